"""`Plan`: the decisions derived from hardware and options, each with its reason; and `Explanation`, which shows it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.distribution import decisions as deciding
from keras_paragrad.distribution.cluster import ClusterKind, cluster_kinds
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Decision, Options, planner_of
from keras_paragrad.plain_text import Printable, counted

# The names of decisions that need not be the same on all workers.
MAY_DIFFER = ("strategy", "devices", "replicas")


@dataclass(frozen=True)
class Plan:
    """Decisions in the order they were made; iterable. Each is also an attribute, such as `plan.strategy`.

    The parallelism makes some, and the functions in `keras_paragrad.distribution.decisions` the others, whose
    docstrings list the values.

    Attributes:
        decisions: The decisions.
        counted: The parts that the model is divided into, in words, unless they are replicas.
        launched: Whether the processes of a cluster have to be started together.
    """

    decisions: tuple[Decision, ...]
    counted: str = ""
    launched: bool = False

    def __getattr__(self, name: str) -> Decision:
        # Not `self.decisions`, which is missing while an instance is unpickled.
        decisions = {decision.name: decision for decision in vars(self).get("decisions", ())}
        if name not in decisions:
            raise AttributeError(f"The plan has no decision {name!r}. Its decisions are {', '.join(decisions)}.")
        return decisions[name]

    def with_decision(self, decision: Decision) -> "Plan":
        """The plan with the decision of this name replaced."""
        decisions = (decision if decision.name == old.name else old for old in self.decisions)
        return dataclasses.replace(self, decisions=tuple(decisions))

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The `value`, `reason` and `override` of each decision, by its name, as JSON-serializable data."""
        return {
            name: {"value": list(value) if isinstance(value, tuple) else value, "reason": reason, "override": override}
            for name, value, reason, override in map(dataclasses.astuple, self)
        }


def make_plan(hardware: Hardware, options: Options) -> Plan:
    """Decides how to train on the hardware, within the given options.

    Args:
        hardware: From `detect`.
        options: The requested options.

    Returns:
        The plan. Nothing is started or changed.

    Raises:
        ValueError: The options can't work on this hardware. The message says what to write instead.

    Example:

    >>> from keras_paragrad.distribution import Options, detect, make_plan
    >>> plan = make_plan(detect({}), Options(strategy="none", jit=True))
    >>> plan.strategy.value, plan.communication.value, plan.jit.value
    ('none', 'none', 'whole_step')
    """
    planner = planner_of(options, hardware)
    planned = planner.decide(hardware, options)
    made = {decision.name: decision for decision in planned.decisions}
    strategy = made.get("strategy") or deciding.decide_strategy(hardware, options)
    kind = planner.kind(strategy.value)
    devices = made.get("devices") or deciding.decide_devices(hardware, options, kind)
    replicas = made.get("replicas") or deciding.decide_replicas(hardware, options, kind, devices.value)
    communication = made.get("communication") or deciding.decide_communication(
        hardware, options, kind, devices.value, replicas.value
    )
    others = (
        made.get("jit") or deciding.decide_jit(hardware, options, devices.value, replicas.value),
        deciding.decide_precision(hardware, devices.value),
        deciding.decide_shard(hardware, options, strategy.value, kind, replicas.value),
        made.get("shard_policy") or deciding.decide_shard_policy(options, kind),
        made.get("exact") or deciding.decide_exact(options),
    )
    return Plan((strategy, devices, replicas, communication, *others), planned.counted, planned.launched)


_JIT = {
    "none": "not compiled by XLA",
    "whole_step": "compiled by XLA",
    "per_replica": "compiled by XLA on each replica",
    "per_stage": "compiled by XLA stage by stage",
}


@dataclass(eq=False, repr=False)
class Explanation(Printable):
    """A plan's summary, the command that starts it, and a table of its decisions; for `print` or a rich console.

    Args:
        plan: The plan.
        hardware: The hardware it was made for.
        estimate: The ways that `fit_memory` chose from; or a table of what each device holds, such as the stages of a
            pipeline.
        division: How a batch is divided, what a part of it weighs, and how that was found.

    Example:

    >>> from keras_paragrad.distribution import Explanation, Options, detect, make_plan
    >>> machine = detect({})
    >>> print(str(Explanation(make_plan(machine, Options(strategy="none")), machine)).splitlines()[3])
    To start it: python train.py
    """

    plan: Plan
    hardware: Hardware
    estimate: ConsoleRenderable | None = None
    division: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in summary_lines(self.plan, self.hardware):
            yield Text(line, overflow="fold")
        table = Table(show_lines=True)
        for header, ratio in (("Decision", None), ("Value", None), ("Why", 3), ("To change it", 2)):
            table.add_column(header, ratio=ratio, overflow="fold")
        for decision in self.plan:
            value = Text(value_in_words(decision.value), "bold")
            table.add_row(Text(decision.name), value, Text(decision.reason), Text(decision.override))
        yield table
        if self.division:
            yield Text(f"Division of a batch: {self.division}", overflow="fold")
        if self.estimate is not None:
            yield self.estimate


def value_in_words(value: object) -> str:
    """A decision's value on one line."""
    if isinstance(value, tuple):
        return " ".join(value if len(value) <= 2 else (value[0], "...", value[-1])) or "-"
    return str(value)


def summary_lines(plan: Plan, hardware: Hardware) -> list[str]:
    """The hardware, the plan, how a step runs, and the command to type.

    Example:

    >>> from keras_paragrad.distribution.hardware import Device, Hardware
    >>> from keras_paragrad.distribution.options import Options
    >>> gpus = tuple(Device(f"GPU:{index}", "GPU") for index in range(4))
    >>> machine = Hardware(64, None, (Device("CPU:0", "CPU"), *gpus), gpus)
    >>> print("\\n".join(summary_lines(make_plan(machine, Options()), machine)))
    Found: 1 CPU, 4 GPUs in this process; no cluster
    Plan: mirrored, 4 replicas on GPU:0 to GPU:3, all-reduce by nccl
    Step: compiled by XLA on each replica, float32, each batch divided among the replicas, exact
    To start it: python train.py
    """
    return [
        f"Found: {deciding.hardware_in_words(hardware)}",
        _plan_line(plan),
        _step_line(plan),
        f"To start it: {_command(plan, hardware)}",
    ]


def _plan_line(plan: Plan) -> str:
    """The strategy, the replicas and their devices, and the collectives, in a line."""
    # The devices of one worker, and the replicas of all.
    devices, replicas = plan.devices.value, plan.replicas.value
    where = "" if not devices else f" on {devices[0]}" if len(devices) == 1 else f" on {devices[0]} to {devices[-1]}"
    if devices and replicas and replicas > len(devices):
        where += f" of each of {replicas // len(devices)} workers"
    all_reduce = "" if plan.communication.value in ("none", "given") else f", all-reduce by {plan.communication.value}"
    strategy = plan.strategy.value if plan.strategy.value != "none" else "no strategy"
    return f"Plan: {strategy}, {plan.counted or counted(replicas, 'replica')}{where}{all_reduce}"


def _step_line(plan: Plan) -> str:
    """Whether a step is compiled, its dtype policy, and what becomes of a batch, in a line."""
    batch = "" if plan.replicas.value == 1 else ", each batch divided among the replicas"
    value = plan.exact.value
    exact = f"exact, {value}" if isinstance(value, str) else "exact" if value else "not exact"
    return f"Step: {_JIT[plan.jit.value]}, {plan.precision.value}{batch}, {exact}"


def _command(plan: Plan, hardware: Hardware) -> str:
    """The command that starts training."""
    cluster = hardware.cluster
    if cluster is None or not plan.launched:
        return "python train.py"
    return {kind.source: kind.command for kind in cluster_kinds()}.get(cluster.source, ClusterKind.command)
