"""`plan_memory`: how to train a model in the memory of its devices: recomputed, in slices, in shards, or as it is."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import keras

from keras_paragrad.compat.types import Specs
from keras_paragrad.compat.variables import variable_bytes
from keras_paragrad.flops import flops_of_operation
from keras_paragrad.memory.breakdown import MemoryBreakdown, breakdowns_of
from keras_paragrad.memory.cost import Cost, Speed, cost_of, measure_speed
from keras_paragrad.memory.estimate import Recomputation, recomputation_of
from keras_paragrad.memory.plan_search import PlanSearch, Try
from keras_paragrad.memory.plan_table import Candidate, Choice, MemoryPlan
from keras_paragrad.memory.recomputation import RECOMPUTATIONS
from keras_paragrad.memory.traced_step import traced_steps
from keras_paragrad.memory.trial import Measured
from keras_paragrad.storage.sharding import MIN_SHARD_BYTES

_log = logging.getLogger("keras_paragrad")
# A step that is estimated to take less than this share is not tried.
_CERTAIN = 0.5


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

    Each way's bytes and seconds are estimated, from one traced step for each form of recomputation. The fastest whose
    bytes fit is trained in a trial; if it takes too much, so is the next.

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
    plan = MemoryPlan(model.name, batch_size, replicas, device_bytes)
    rows = -(-batch_size // replicas)

    def estimator_of(slices: list[int]) -> _Estimator:
        sizes = [-(-rows // count) for count in slices]
        return _Estimator(model, replicas, shards, min_shard_bytes, batch_spec, slices, sizes)

    estimator = estimator_of([1] if no_slices else [2**power for power in range(rows.bit_length())])
    plan.recomputed[None] = []
    try:
        plan.candidates, spec = estimator.candidates(None, None)
    except ValueError:
        # Batches of other sizes were traced, for slices.
        no_slices, estimator = no_slices or f"it trains on batches of {rows} rows alone", estimator_of([1])
        try:
            plan.candidates, spec = estimator.candidates(None, None)
        except ValueError as error:
            raise ValueError(f"{error} fit_memory=True goes by that step: leave it out.") from error
    as_it_is = Choice(shard=shards[0])
    plan.chosen = next(candidate for candidate in plan.candidates if candidate.choice == as_it_is)
    if plan.chosen.estimated.bytes <= _CERTAIN * device_bytes:
        return plan
    if no_slices:
        plan.left_out.append(f"No slices: {no_slices}.")
    for form, recomputation in _recomputations(model, plan.left_out):
        plan.recomputed[form] = recomputation.names
        plan.candidates += estimator.candidates(form, recomputation)[0]
    # A model that fits as it is stays so, even where shards or slices are faster.
    plan.candidates.sort(key=lambda candidate: (candidate.choice != as_it_is, candidate.estimated.seconds))
    PlanSearch(plan, functools.cache(lambda: begin(spec)) if begin else None, log).run()
    return plan


def _recomputations(model: keras.Model, left_out: list[str]) -> Iterable[tuple[str, Recomputation]]:
    """Yields the forms of recomputation, `"auto"` and `"all"`, that recompute something, and not the same.

    Appends to `left_out` why there are none.
    """
    if RECOMPUTATIONS.of(model):
        left_out.append("No other recomputation: recompute(model, ...) was called.")
        return
    known: list[list[str]] = [[]]
    for form in ("auto", "all"):
        try:
            recomputation = recomputation_of(model, form)
        except ValueError as error:
            left_out.append(f"No recomputation: {error}")
            return
        if recomputation.names not in known:
            known.append(recomputation.names)
            yield form, recomputation
    if len(known) == 1:
        left_out.append("No recomputation: no part of the model can be recomputed, or frees memory.")


class _Estimator(NamedTuple):
    """Estimates ways to train, with each number of `slices`, whose rows are in `sizes`, and each value of `shards`."""

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
        batch_bytes = sum(steps[0].block.input_sizes)
        speed = measure_speed()
        candidates = []
        for slices, rows, step in zip(self.slices, self.sizes, steps, strict=True):
            gradient, update = cost_of(step)
            for column in breakdowns_of(self.model, step, self.replicas, least=self.min_shard_bytes):
                if column.shard in self.shards:
                    # With several slices, the sums of their gradients live, and the batch that they are cut from.
                    held = column.parameters + batch_bytes if slices > 1 else 0
                    seconds = self._seconds(gradient, update, column, slices, speed)
                    estimated = Measured(column.total + held, seconds)
                    candidates.append(Candidate(Choice(form, slices, column.shard), rows, estimated))
        return sorted(candidates, key=lambda candidate: candidate.estimated.seconds), steps[0].batch

    def _seconds(self, gradient: Cost, update: Cost, column: MemoryBreakdown, slices: int, speed: Speed) -> float:
        """The time of a step: of its slices, of adding up their gradients, of collectives, and of the update."""
        weights = column.parameters
        total = slices * speed.seconds(gradient)
        if slices > 1:
            # Reads the sum and the gradient, and writes the sum.
            total += slices * speed.seconds(Cost(bytes=3 * weights, operations=len(self.model.trainable_variables)))
        if self.replicas > 1:
            sharded = 1 / self.replicas if column.shard else 1.0
            unsharded = sum(variable_bytes(variable) for variable in self.model.trainable_variables)
            # How often bytes of all weights are moved: for all-reduced gradients, or for reduced ones and gathered
            # weights, after the update or in both passes of each slice.
            moved = {None: 2, "optimizer": 3, "parameters": 1 + 2 * slices}[column.shard]
            total += speed.seconds(Cost(bytes=moved * unsharded)) + sharded * speed.seconds(update)
        else:
            total += speed.seconds(update)
        return total
