"""`Plan`: the decisions derived from hardware and options, each with its reason."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keras_paragrad.distribution.decisions.decision import Decision, deciders
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options, planner_of

__all__ = ["Decision", "Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """Decisions in the order they were made; iterable. Each is also an attribute, such as `plan.strategy`.

    The parallelism makes some, and the functions in `keras_paragrad.distribution.decisions` the others, whose
    docstrings list the values.

    Attributes:
        decisions: The decisions.
        alike: The names of those that have to be the same on all workers.
        counted: The parts that the model is divided into, in words, if those aren't replicas.
        launched: Whether the processes of a cluster have to be started together.
    """

    decisions: tuple[Decision, ...]
    alike: tuple[str, ...] = ()
    counted: str = ""
    launched: bool = False

    def __getattr__(self, name: str) -> Decision:
        # Not `self.decisions`, which is missing while an instance is unpickled.
        decisions = {decision.name: decision for decision in vars(self).get("decisions", ())}
        if name not in decisions:
            raise AttributeError(f"The plan has no decision {name!r}. Its decisions are {', '.join(decisions)}.")
        return decisions[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(decision.name for decision in self)})

    def with_decision(self, decision: Decision) -> "Plan":
        """The plan with the decision of this name replaced."""
        decisions = (decision if decision.name == each.name else each for each in self.decisions)
        return dataclasses.replace(self, decisions=tuple(decisions))

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The plan as JSON-serializable data.

        Returns:
            For each decision, by name: `value`, `reason`, `evidence` and `override`.
        """
        return {decision.name: decision.to_dict() for decision in self}


def make_plan(hardware: Hardware, options: Options) -> Plan:
    """Decides how to train on the hardware, within the given options.

    Args:
        hardware: From `detect` or `describe`.
        options: The requested options.

    Returns:
        The plan. Nothing is started or changed.

    Raises:
        ValueError: The options can't work on this hardware. The message says what to write instead.

    Example:

    >>> from keras_paragrad.distribution import describe
    >>> from keras_paragrad.distribution import Options
    >>> from keras_paragrad.distribution import make_plan
    >>> plan = make_plan(describe(gpus=4, compute_capability=(9, 0)), Options())
    >>> plan.strategy.value, plan.communication.value, plan.jit.value
    ('mirrored', 'nccl', 'per_replica')
    """
    planned = planner_of(options, hardware).decide(hardware, options)
    by_parallelism = {decision.name: decision for decision in planned.decisions}
    known: dict[str, Any] = {"hardware": hardware, "options": options}
    decisions, alike = [], []
    for decider in deciders():
        decision = by_parallelism.get(decider.name) or decider(known)
        known[decision.name] = decision.value
        decisions.append(decision)
        if decider.alike:
            alike.append(decision.name)
    return Plan(tuple(decisions), tuple(alike), planned.counted, planned.launched)
