"""How to train a model in the memory of its devices: recomputed, in slices, in shards, or as it is.

candidates = the ways to train, each with its estimated bytes and seconds, from one traced step for each form
for the candidates that may fit, from the fastest on:
    train two steps in a process of its own; the first that takes no more than the memory is chosen
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.compat.types import Specs
from keras_paragrad.compat.variables import variable_bytes
from keras_paragrad.engine.step.segments import recompute_parts
from keras_paragrad.flops import flops_of_operation
from keras_paragrad.memory.available import STEP_SHARE
from keras_paragrad.memory.breakdown import MemoryBreakdown, breakdowns_of
from keras_paragrad.memory.cost import Cost, cost_of, measure_speed
from keras_paragrad.memory.recomputation import RECOMPUTATIONS
from keras_paragrad.memory.recomputed_segments import Cut, cut_for_least_memory
from keras_paragrad.memory.traced_step import traced_steps
from keras_paragrad.memory.trial import CannotTryError, Measured, warn_untried
from keras_paragrad.plain_text import Printable, bytes_in_words, counted
from keras_paragrad.storage.sharding import MIN_SHARD_BYTES

_log = logging.getLogger("keras_paragrad")
# A step that is estimated to take less than this share is not tried.
_CERTAIN = 0.5
# Rows of the table after the chosen one.
_SHOWN_AFTER = 4
_CANNOT_SLICE = "can't be cut into slices"


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


@dataclass
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


# Trains in one way, and returns what it took; `None` if memory ran out. Raises `CannotTryError`.
Try = Callable[[Candidate], Measured | None]


@dataclass(repr=False, eq=False)
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
        left_out: Why some ways aren't candidates.
        trials: Number of trials.
    """

    model: str
    batch_size: int
    replicas: int
    device_bytes: int
    candidates: list[Candidate] = field(default_factory=list)
    chosen: Candidate | None = None
    recomputed: dict[str | None, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    trials: int = 0

    @property
    def least(self) -> Candidate:
        """The candidate with the least estimated bytes."""
        return min(self.candidates, key=lambda candidate: candidate.estimated.bytes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON's types, in bytes and seconds."""
        found = dataclasses.asdict(self)
        found["recomputed"] = {form: names for form, names in self.recomputed.items() if form}
        for candidate, described in zip(self.candidates, found["candidates"], strict=True):
            described["chosen"] = candidate is self.chosen
        del found["chosen"]
        return found

    def in_words(self) -> str:
        """What was chosen, on one line."""
        assert self.chosen is not None
        return way_in_words(self.chosen, self.recomputed)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        devices, memory = counted(self.replicas, "device"), bytes_in_words(self.device_bytes)
        yield Text(f"{self.model}, batches of {self.batch_size} on {devices}, {memory} on each", "bold")
        table = Table()
        for name in ("recompute", "Slices", *(("shard",) if self.replicas > 1 else ()), "Per device", "Seconds", ""):
            table.add_column(name, justify="right" if name in ("Slices", "Per device", "Seconds") else "left")
        chosen = next((index for index, candidate in enumerate(self.candidates) if candidate is self.chosen), 0)
        shown = self.candidates[: chosen + _SHOWN_AFTER + 1]
        for candidate in shown:
            recompute, slices, shard = candidate.choice.recompute, candidate.choice.slices, candidate.choice.shard
            cells = [recompute or "nothing", f"{slices} x {candidate.rows}" if slices > 1 else "1"]
            cells += [shard or "nothing"] if self.replicas > 1 else []
            taken = candidate.measured or candidate.estimated
            note = "tried" if candidate.measured else "estimated"
            why = "chosen" if candidate is self.chosen else candidate.why_not
            cells += [bytes_in_words(taken.bytes), f"{taken.seconds:.3g}", f"{note}, {why}" if why else note]
            table.add_row(*cells, style="bold" if candidate is self.chosen else None)
        yield table
        if (slower := len(self.candidates) - len(shown)) > 0:
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


def plan_memory(
    model: keras.Model,
    batch_size: int,
    device_bytes: int,
    begin: Callable[[Specs], Try] | None,
    *,
    replicas: int = 1,
    shards: Sequence[str | None] = (None,),
    min_shard_bytes: int = MIN_SHARD_BYTES,
    batch_spec: Specs = None,
    no_slices: str = "",
    log: Callable[[str], None] = _log.info,
) -> MemoryPlan:
    """Finds the fastest way to train a model that its devices have the memory for.

    Args:
        model: A compiled and built model. It isn't changed.
        batch_size: Examples in a batch.
        device_bytes: What training may take on a device, in bytes.
        begin: Makes the function that tries one way, from the `tf.TypeSpec` of batches; without it, the estimate
            decides, in 80% of the memory.
        replicas: Number of devices.
        shards: The values of `shard` to choose from.
        min_shard_bytes: The size of a trainable variable, in bytes, from which it is sharded.
        batch_spec: The `tf.TypeSpec` of batches, or `None` to derive it from the model.
        no_slices: Why batches can't be cut into slices; empty if they can.
        log: Gets a line for each trial.

    Raises:
        ValueError: The step can't be traced, or nothing fits. The message says what to write.
    """
    plan = MemoryPlan(model.name, batch_size, replicas, device_bytes, recomputed={None: []})
    rows = -(-batch_size // replicas)

    def estimated(form: str | None, counts: Sequence[int]) -> tuple[list[Candidate], Specs]:
        """The ways with these numbers of slices and a form of recomputation, which is in effect; a batch's spec."""
        sizes = [-(-rows // slices) for slices in counts]
        steps = traced_steps(model, sizes, batch_spec, flops_of_operation)
        batch_bytes, candidates = sum(steps[0].block.input_sizes), list[Candidate]()
        for slices, size, step in zip(counts, sizes, steps, strict=True):
            costs = cost_of(step)
            for column in breakdowns_of(model, step, replicas, least=min_shard_bytes):
                if column.shard in shards:
                    # With several slices, the sums of their gradients live, and the batch that they are cut from.
                    held = column.parameters + batch_bytes if slices > 1 else 0
                    seconds = _seconds(model, costs, column, slices, replicas)
                    choice = Choice(form, slices, column.shard)
                    candidates.append(Candidate(choice, size, Measured(column.total + held, seconds)))
        return sorted(candidates, key=lambda candidate: candidate.estimated.seconds), steps[0].batch

    counts = [1] if no_slices else [2**power for power in range(rows.bit_length())]
    try:
        plan.candidates, spec = estimated(None, counts)
    except ValueError:
        # Batches of other sizes were traced, for slices.
        no_slices, counts = no_slices or f"it trains on batches of {rows} rows alone", [1]
        try:
            plan.candidates, spec = estimated(None, counts)
        except ValueError as error:
            raise ValueError(f"{error} fit_memory=True goes by that step: leave it out.") from error
    as_it_is = Choice(shard=shards[0])
    plan.chosen = next(candidate for candidate in plan.candidates if candidate.choice == as_it_is)
    if plan.chosen.estimated.bytes <= _CERTAIN * device_bytes:
        return plan
    if no_slices:
        plan.left_out.append(f"No slices: {no_slices}.")
    for form, cut in _recomputations(model, plan):
        end = recompute_parts(model, cut.functional, cut.segments)
        try:
            plan.candidates += estimated(form, counts)[0]
        finally:
            end()
    # A model that fits as it is stays so, even where shards or slices are faster.
    plan.candidates.sort(key=lambda candidate: (candidate.choice != as_it_is, candidate.estimated.seconds))
    choose(plan, functools.partial(begin, spec) if begin else None, log)
    return plan


def _recomputations(model: keras.Model, plan: MemoryPlan) -> Iterator[tuple[str, Cut]]:
    """Yields the forms of recomputation, `"auto"` and `"all"`, that recompute something, and not the same.

    Notes in the plan what each recomputes, or why there are none.
    """
    if RECOMPUTATIONS.of(model):
        plan.left_out.append("No other recomputation: recompute(model, ...) was called.")
        return
    for form in ("auto", "all"):
        try:
            cut = cut_for_least_memory(model, where_it_pays=form == "auto")
        except ValueError as error:
            plan.left_out.append(f"No recomputation: {error}")
            return
        names = [part.name for part, recomputed in cut.segments if recomputed]
        if names not in plan.recomputed.values():
            plan.recomputed[form] = names
            yield form, cut
    if len(plan.recomputed) == 1:
        plan.left_out.append("No recomputation: no part of the model can be recomputed, or frees memory.")


def _seconds(
    model: keras.Model, costs: tuple[Cost, Cost], column: MemoryBreakdown, slices: int, replicas: int
) -> float:
    """The time of a step: of its slices, of adding up their gradients, of collectives, and of the update."""
    speed, (gradient, update) = measure_speed(), costs
    total = slices * speed.seconds(gradient)
    if slices > 1:
        # Reads the sum and the gradient, and writes the sum.
        total += slices * speed.seconds(Cost(bytes=3 * column.parameters, operations=len(model.trainable_variables)))
    if replicas == 1:
        return total + speed.seconds(update)
    unsharded = sum(variable_bytes(variable) for variable in model.trainable_variables)
    # How often bytes of all weights are moved: for all-reduced gradients, or for reduced ones and gathered weights,
    # after the update or in both passes of each slice.
    moved = {None: 2, "optimizer": 3, "parameters": 1 + 2 * slices}[column.shard]
    sharded = 1 / replicas if column.shard else 1.0
    return total + speed.seconds(Cost(bytes=moved * unsharded)) + sharded * speed.seconds(update)


def choose(plan: MemoryPlan, begin: Callable[[], Try] | None, log: Callable[[str], None]) -> None:
    """Sets the plan's `chosen` candidate to the first that fits, or raises a `ValueError`.

    `begin` makes the trial; without it, or where the model can't be tried, the estimate decides.
    """
    left_out, plan.chosen = list(plan.left_out), None
    if begin:
        try:
            _try_in_order(plan, begin(), log)
        except CannotTryError as error:
            warn_untried("fit_memory", plan.model, error)
            # Whether it can be cut into slices is as unknown as before.
            plan.left_out, begin = left_out, None
    if begin is None:
        _choose_by_estimate(plan)
    if plan.chosen is None:
        raise _refusal(plan)


def _try_in_order(plan: MemoryPlan, trial: Try, log: Callable[[str], None]) -> None:
    """Trains in each way that may fit until one does; at last, as estimates may be too large, in the one of least.

    Raises:
        CannotTryError: The model can't be trained in another process.
    """
    limit, failed = plan.device_bytes, list[int]()
    # The most bytes that a trial took besides the estimate, such as for the graph.
    besides, cannot_slice = 0, False

    def fits(candidate: Candidate) -> bool:
        nonlocal besides, cannot_slice
        try:
            candidate.measured = trial(candidate)
        except CannotTryError as error:
            if candidate.choice.slices == 1:
                raise
            plan.left_out.append(f"No slices: {str(error).rstrip('.')}.")
            cannot_slice, candidate.why_not = True, _CANNOT_SLICE
            return False
        plan.trials += 1
        # A process that took too much was ended at the limit.
        taken = candidate.measured.bytes if candidate.measured else limit
        besides = max(besides, taken - candidate.estimated.bytes)
        fits = candidate.measured is not None and candidate.measured.bytes <= limit
        took = f"{bytes_in_words(taken)} of" if candidate.measured else "more than"
        ending = "." if fits else ", too much."
        log(f"{way_in_words(candidate, plan.recomputed)}: {took} {bytes_in_words(limit)}{ending}")
        if not fits:
            failed.append(candidate.estimated.bytes)
            candidate.why_not = "too much"
        return fits

    untried: list[Candidate] = []
    for candidate in plan.candidates:
        if candidate.choice.slices > 1 and cannot_slice:
            candidate.why_not = _CANNOT_SLICE
        elif candidate.estimated.bytes + besides > limit or any(candidate.estimated.bytes >= size for size in failed):
            candidate.why_not = "too much"
            untried.append(candidate)
        elif fits(candidate):
            plan.chosen = candidate
            return
    untried = [candidate for candidate in untried if candidate.choice.slices == 1 or not cannot_slice]
    least = min(untried, key=lambda candidate: candidate.estimated.bytes, default=None)
    if least and fits(least):
        plan.chosen, least.why_not = least, ""


def _choose_by_estimate(plan: MemoryPlan) -> None:
    """Chooses the first candidate that takes 80% of the memory by its estimate, or one that takes less than all."""
    for candidate in plan.candidates:
        fits = candidate.estimated.bytes <= STEP_SHARE * plan.device_bytes
        candidate.why_not = "" if fits or plan.chosen else "too much"
        plan.chosen = plan.chosen or (candidate if fits else None)
    if plan.chosen is None and plan.least.estimated.bytes <= plan.device_bytes:
        plan.chosen = plan.least
        plan.chosen.why_not = ""
        _log.warning(
            "A step of %s may run out of memory: it is estimated to take %s per device, of %s, %s.",
            *(plan.model, bytes_in_words(plan.chosen.estimated.bytes), bytes_in_words(plan.device_bytes)),
            plan.in_words(),
        )


def _refusal(plan: MemoryPlan) -> ValueError:
    """The error where no candidate fits."""
    least, memory = plan.least, bytes_in_words(plan.device_bytes)
    more = ", and more in a trial" if least.estimated.bytes <= plan.device_bytes else ""
    # Slices take what the update of a single row does, but for the batch that they are cut from.
    sliced = any(candidate.choice.slices > 1 for candidate in plan.candidates)
    instead = "an optimizer that keeps less, such as SGD, or a smaller model" if sliced else "or a smaller batch"
    return ValueError(
        f"A batch of {plan.batch_size} of {plan.model!r} doesn't fit in {memory} on each of "
        f"{counted(plan.replicas, 'device')}. The least is estimated to take {bytes_in_words(least.estimated.bytes)}, "
        f"{way_in_words(least, plan.recomputed)}{more}. {' '.join([*plan.left_out, 'Use'])} more devices, {instead}."
    )
