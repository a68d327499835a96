"""`plan_memory`: how to train a model in the memory of its devices: recomputed, in slices, in shards, or as it is."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.compat.types import Specs
from keras_paragrad.compat.variables import variable_bytes
from keras_paragrad.engine.step.tracing import traced_steps
from keras_paragrad.flops import flops_of_operation
from keras_paragrad.memory.breakdown import MemoryBreakdown, breakdowns_of
from keras_paragrad.memory.cost import Cost, Speed, cost_of, measure_speed
from keras_paragrad.memory.estimate import Recomputation, bytes_in_words, recomputation_of
from keras_paragrad.memory.recomputation import RECOMPUTATIONS
from keras_paragrad.memory.trial import CannotTryError, Measured
from keras_paragrad.plain_text import Printable, counted
from keras_paragrad.storage.sharding import MIN_SHARD_BYTES

_log = logging.getLogger("keras_paragrad")
# The share of the memory that a step which is not tried may take; the rest covers the estimate's error.
UNTRIED = 0.8
# A step that is estimated to take less than this share is not tried.
_CERTAIN = 0.5
# Bytes that TensorFlow takes for its first step, besides tensors, and for each operation of its graph, as seen on CPUs.
_RUNTIME, _OF_OPERATION = 64 * 2**20, 32 * 2**10
# Ways that are tried, though a trial says that they take too much, before all are refused.
_LAST_RESORTS = 3
# Rows of the table after the chosen one.
_SHOWN_AFTER = 4


@dataclass(frozen=True)
class Choice:
    """One way to train.

    Attributes:
        recompute: What is recomputed: nothing (`None`), what `"auto"` chooses, or `"all"` that frees memory.
        slices: Number of slices of each device's part of a batch.
        shard: What is in shards: nothing (`None`), the `"optimizer"`'s state, or all `"parameters"`.
    """

    recompute: str | None = None
    slices: int = 1
    shard: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what it takes on each device.

    Attributes:
        choice: The way.
        rows: The most rows of a slice.
        estimated: The estimated bytes and seconds of a step.
        measured: The same in a trial; `None` if it was not tried, or ran out of memory.
        why_not: Why it wasn't chosen; empty for the one that was, and for slower ones.
    """

    choice: Choice
    rows: int
    estimated: Measured
    measured: Measured | None = None
    why_not: str = ""


class MemoryPlan(Printable):
    """The ways to train a model in the memory of its devices, from the fastest on, for `print` or a rich console.

    Attributes:
        model: The model's name.
        batch_size: Examples in a batch.
        replicas: Number of devices.
        device_bytes: What training may take on each, in bytes.
        candidates: The ways, by estimated seconds.
        chosen: The chosen one.
        recomputed: The names of the parts that each value of `recompute` recomputes.
        left_out: Why some ways are no candidates.
        trials: Number of trials.
    """

    def __init__(self, model: str, batch_size: int, replicas: int, device_bytes: int):
        self.model, self.batch_size, self.replicas, self.device_bytes = model, batch_size, replicas, device_bytes
        self.candidates: list[Candidate] = []
        self.chosen: Candidate | None = None
        self.recomputed: dict[str | None, list[str]] = {}
        self.left_out: list[str] = []
        self.trials = 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON's types, in bytes and seconds."""
        candidates = [
            {**dataclasses.asdict(candidate), "chosen": candidate is self.chosen} for candidate in self.candidates
        ]
        return {
            **{"model": self.model, "batch_size": self.batch_size, "replicas": self.replicas},
            **{"device_bytes": self.device_bytes, "trials": self.trials, "left_out": self.left_out},
            "recomputed": {str(form): names for form, names in self.recomputed.items() if form},
            "candidates": candidates,
        }

    def in_words(self) -> str:
        """What was chosen, on one line."""
        assert self.chosen is not None
        return way_in_words(self.chosen, self.recomputed)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        devices = counted(self.replicas, "device")
        yield Text(
            f"{self.model}, batches of {self.batch_size} on {devices}, {bytes_in_words(self.device_bytes)} on each",
            "bold",
        )
        table = Table()
        for name in ("recompute", "Slices", *(("shard",) if self.replicas > 1 else ()), "Per device", "Seconds", ""):
            table.add_column(name, justify="right" if name in ("Slices", "Per device", "Seconds") else "left")
        last = (
            next((index for index, candidate in enumerate(self.candidates) if candidate is self.chosen), 0)
            + _SHOWN_AFTER
        )
        for candidate in self.candidates[: last + 1]:
            recompute, slices, shard = candidate.choice.recompute, candidate.choice.slices, candidate.choice.shard
            cells = [recompute or "nothing", f"{slices} x {candidate.rows}" if slices > 1 else "1"]
            cells += [shard or "nothing"] if self.replicas > 1 else []
            measured = candidate.measured or candidate.estimated
            how = "tried" if candidate.measured else "estimated"
            chosen = candidate is self.chosen
            note = ", ".join(filter(None, [how, "chosen" if chosen else candidate.why_not]))
            row = (*cells, bytes_in_words(measured.bytes), f"{measured.seconds:.3g}", note)
            table.add_row(*row, style="bold" if chosen else None)
        yield table
        if (slower := len(self.candidates) - last - 1) > 0:
            yield Text(f"{slower} slower ones are not shown; to_dict() has all.", "dim")
        for line in self.left_out:
            yield Text(line, "dim", overflow="fold")


def way_in_words(candidate: Candidate, recomputed: dict[str | None, list[str]]) -> str:
    """A way to train, in words."""
    recompute, slices, shard = candidate.choice.recompute, candidate.choice.slices, candidate.choice.shard
    words = [f"{counted(len(recomputed[recompute]), 'part')} recomputed"] if recompute else []
    words += [f"{slices} slices of {counted(candidate.rows, 'row')}"] if slices > 1 else []
    words += [f"the {shard} in shards"] if shard else []
    return ", ".join(words) or "as it is"


# Trains in one way, and returns what it took; `None` if memory ran out. Raises `CannotTryError`.
Try = Callable[[Candidate], Measured | None]


def plan_memory(
    model: keras.Model,
    batch_size: int,
    device_bytes: int,
    begin: Callable[[Specs], Try] | None,
    *,
    replicas: int = 1,
    rows: int | None = None,
    shards: Sequence[str | None] = (None,),
    min_shard_bytes: int = MIN_SHARD_BYTES,
    batch_spec: Specs = None,
    no_slices: str = "",
    log: Callable[[str], None] = _log.info,
) -> MemoryPlan:
    """Finds the fastest way to train a model that its devices have the memory for.

    Each way's bytes and seconds are estimated, from one traced step for each form of recomputation. The fastest whose
    bytes fit is trained in a trial; if it takes too much, so is the next.

    Args:
        model: A compiled and built model. It isn't changed.
        batch_size: Examples in a batch.
        device_bytes: What training may take on a device, in bytes.
        begin: Makes what trains in one way, from the `tf.TypeSpec` of batches; without it, the estimate decides, in
            80% of the memory.
        replicas: Number of devices.
        rows: The most examples of a batch on a device; by default an equal share.
        shards: The values of `shard` to choose from.
        min_shard_bytes: The size of a trainable variable, in bytes, from which it is sharded.
        batch_spec: The `tf.TypeSpec` of batches, or `None` to derive it from the model.
        no_slices: Why batches can't be cut into slices; empty if they can.
        log: Gets a line for each trial.

    Raises:
        ValueError: The step can't be traced, or nothing fits. The message says what to write.
    """
    plan = MemoryPlan(model.name, batch_size, replicas, device_bytes)
    rows = rows or -(-batch_size // replicas)
    slices = [1] if no_slices else [2**power for power in range(rows.bit_length()) if 2**power <= rows]
    sizes = [-(-rows // count) for count in slices]
    estimator = _Estimator(model, replicas, shards, min_shard_bytes, batch_spec, slices, sizes)

    plan.recomputed[None] = []
    plan.candidates, spec = estimator.candidates(None, None)
    first = plan.candidates[0]
    if first.choice == Choice(shard=shards[0]) and first.estimated.bytes <= _CERTAIN * device_bytes:
        plan.chosen = first
        return plan
    if no_slices:
        plan.left_out.append(f"No slices: {no_slices}.")
    for form, recomputation in _recomputations(model, plan.left_out):
        plan.recomputed[form] = recomputation.names
        plan.candidates += estimator.candidates(form, recomputation)[0]
    plan.candidates.sort(key=lambda candidate: candidate.estimated.seconds)
    _Search(plan, functools.cache(lambda: begin(spec)) if begin else None, log).run()
    return plan


def _recomputations(model: keras.Model, left_out: list[str]) -> Iterable[tuple[str, Recomputation]]:
    """The forms of recomputation that recompute something, each another set of parts."""
    if RECOMPUTATIONS.of(model):
        left_out.append("No other recomputation: recompute(model, ...) was called.")
        return
    known: list[list[str]] = [[]]
    for form in ("auto", "all"):
        recomputation = recomputation_of(model, form)
        if recomputation.names not in known:
            known.append(recomputation.names)
            yield form, recomputation
    if len(known) == 1:
        left_out.append("No recomputation: no part of the model can be recomputed, or frees memory.")


class _Estimator(NamedTuple):
    """Estimates bytes and seconds of the ways to train that have one form of recomputation."""

    model: keras.Model
    replicas: int
    shards: Sequence[str | None]
    min_shard_bytes: int
    batch_spec: Specs
    slices: Sequence[int]
    sizes: Sequence[int]

    def candidates(self, form: str | None, recomputation: Recomputation | None) -> tuple[list[Candidate], Specs]:
        """The ways to train with a form of recomputation, by estimated seconds; and the spec of a batch."""
        with recomputation.in_effect() if recomputation else nullcontext():
            steps = traced_steps(self.model, self.sizes, self.batch_spec, flops_of_operation)
        whole = sum(steps[0].block.input_sizes)
        # On a GPU, the host has the graph.
        on_gpu = bool(tf.config.get_visible_devices("GPU"))
        graph = 0 if on_gpu else (_RUNTIME + _OF_OPERATION * steps[0].block.size) // self.replicas
        speed = measure_speed()
        found = []
        for slices, rows, step in zip(self.slices, self.sizes, steps, strict=True):
            gradient, update = cost_of(step)
            for column in breakdowns_of(self.model, step, self.replicas, least=self.min_shard_bytes):
                if column.shard in self.shards:
                    # With several slices, the sums of their gradients live, and the batch that they are cut from.
                    held = column.parameters + whole if slices > 1 else 0
                    seconds = self._seconds(gradient, update, column, slices, speed)
                    estimated = Measured(column.total + held + graph, seconds)
                    found.append(Candidate(Choice(form, slices, column.shard), rows, estimated))
        return sorted(found, key=lambda candidate: candidate.estimated.seconds), steps[0].batch

    def _seconds(self, gradient: Cost, update: Cost, column: MemoryBreakdown, slices: int, speed: Speed) -> float:
        """The time of a step: of its slices, of adding up their gradients, of collectives, and of the update."""
        weights = column.parameters
        total = slices * speed.seconds(gradient)
        if slices > 1:
            # Reads the sum and the gradient, and writes the sum.
            total += slices * speed.seconds(Cost(bytes=3 * weights, operations=len(self.model.trainable_variables)))
        if self.replicas > 1:
            sharded = 1 / self.replicas if column.shard else 1.0
            whole = sum(variable_bytes(variable) for variable in self.model.trainable_variables)
            # All-reduced gradients; or reduced ones, and gathered weights: after the update, or in both passes.
            moved = {None: 2, "optimizer": 3, "parameters": 1 + 2 * slices}[column.shard]
            total += speed.seconds(Cost(bytes=moved * whole)) + sharded * speed.seconds(update)
        else:
            total += speed.seconds(update)
        return total


class _Search:
    """Chooses the first of a plan's candidates that fits.

    Args:
        plan: The plan.
        begin: Makes the trial; without it, the estimate decides.
        log: Gets a line for each trial.
    """

    def __init__(self, plan: MemoryPlan, begin: Callable[[], Try] | None, log: Callable[[str], None]):
        self._plan, self._begin, self._log = plan, begin, log
        self._failed: list[Candidate] = []
        # What a trial took besides the estimate, such as the graph.
        self._besides = 0
        self._sliced = True

    def run(self) -> None:
        """Sets `chosen`.

        Raises:
            ValueError: Nothing fits. The message says what to write.
        """
        try:
            for index, candidate in enumerate(self._plan.candidates):
                if self._settle(index, self._why_not(candidate)):
                    return
            # Estimates may be too large.
            if self._begin and any(self._settle(index, "") for index in self._last_resorts()):
                return
        except CannotTryError as error:
            _log.warning(
                "fit_memory goes by the estimate of %r alone, in %d%% of the memory: %s.",
                *(self._plan.model, round(100 * UNTRIED), str(error).rstrip(".")),
            )
            _Search(self._plan, None, self._log).run()
            return
        _refuse(self._plan, tried=bool(self._failed))

    def _why_not(self, candidate: Candidate) -> str:
        """Why a candidate needs no trial; empty if it does."""
        if not self._sliced and candidate.choice.slices > 1:
            return "can't be cut into slices"
        limit = self._plan.device_bytes if self._begin else UNTRIED * self._plan.device_bytes
        if candidate.estimated.bytes + self._besides > limit:
            return "too much"
        if any(candidate.estimated.bytes >= other.estimated.bytes for other in self._failed):
            return "more than one that was too much"
        return ""

    def _settle(self, index: int, why_not: str) -> bool:
        """Tries a candidate, if nothing is against it, and notes what came of it; returns whether it is chosen."""
        plan = self._plan
        if not why_not and self._begin:
            why_not = self._try(index, self._begin)
        plan.candidates[index] = dataclasses.replace(plan.candidates[index], why_not=why_not)
        plan.chosen = None if why_not else plan.candidates[index]
        return not why_not

    def _try(self, index: int, begin: Callable[[], Try]) -> str:
        """Trains in one way; returns why it isn't chosen, or nothing.

        Raises:
            CannotTryError: The model can't be trained in another process.
        """
        plan, candidate = self._plan, self._plan.candidates[index]
        trial = begin()
        try:
            measured = trial(candidate)
        except CannotTryError as error:
            if candidate.choice.slices == 1:
                raise
            self._sliced = False
            plan.left_out.append(f"No slices: {str(error).rstrip('.')}.")
            return "can't be cut into slices"
        plan.trials += 1
        plan.candidates[index] = dataclasses.replace(candidate, measured=measured)
        limit = bytes_in_words(plan.device_bytes)
        fits = measured is not None and measured.bytes <= plan.device_bytes
        took = "more than" if measured is None else f"{bytes_in_words(measured.bytes)} of"
        self._log(f"{way_in_words(candidate, plan.recomputed)}: {took} {limit}{'' if fits else ', too much'}.")
        # A process that took too much was ended at the limit.
        taken = measured.bytes if measured else plan.device_bytes
        self._besides = max(self._besides, taken - candidate.estimated.bytes)
        if fits:
            return ""
        self._failed.append(candidate)
        return "too much"

    def _last_resorts(self) -> list[int]:
        """The candidates to try before all are refused: the fastest that may fit, and the one with the least bytes."""
        tried = {candidate.choice for candidate in self._failed}
        untried = [
            index
            for index, candidate in enumerate(self._plan.candidates)
            if candidate.choice not in tried and (self._sliced or candidate.choice.slices == 1)
        ]
        if not untried:
            return []
        taken = [candidate.estimated.bytes for candidate in self._plan.candidates]
        failed = min((candidate.estimated.bytes for candidate in self._failed), default=self._plan.device_bytes)
        fastest = [index for index in untried if taken[index] < min(failed, self._plan.device_bytes)]
        least = min(untried, key=lambda index: taken[index])
        return list(dict.fromkeys([*fastest[:_LAST_RESORTS], least]))


def _refuse(plan: MemoryPlan, *, tried: bool) -> None:
    """Raises if nothing fits; by the estimate alone, what takes the least may, and is chosen with a warning."""
    least = min(plan.candidates, key=lambda candidate: candidate.estimated.bytes)
    words = way_in_words(least, plan.recomputed)
    takes = bytes_in_words(least.estimated.bytes)
    if not tried and least.estimated.bytes <= plan.device_bytes:
        plan.chosen = dataclasses.replace(least, why_not="")
        plan.candidates = [plan.chosen if other is least else other for other in plan.candidates]
        _log.warning(
            "A step of %s may run out of memory: it is estimated to take %s per device, of %s, %s.",
            *(plan.model, takes, bytes_in_words(plan.device_bytes), words),
        )
        return
    others = " ".join(plan.left_out)
    instead = "Use more devices, or a smaller batch"
    if not any(line.startswith("No slices") for line in plan.left_out):
        instead += " with AccumulatingOptimizer, which makes the same update of several"
    raise ValueError(
        f"A batch of {plan.batch_size} of {plan.model!r} doesn't fit in {bytes_in_words(plan.device_bytes)} on each of "
        f"{counted(plan.replicas, 'device')}. The least is estimated to take {takes}, {words}.{others and ' '}{others} "
        f"{instead}."
    )
