"""What a device holds under each way to shard a model, from a traced step and the sizes of variables."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import children
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.variables import optimizer_variables, variable_bytes
from keras_paragrad.engine.step.tracing import TracedStep
from keras_paragrad.memory.liveness import Peaks, step_peaks
from keras_paragrad.storage.partition import MIN_SHARD_BYTES

SHARDS = (None, "optimizer", "parameters")


@dataclasses.dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes per device under one value of `shard`.

    Attributes:
        shard: What is sharded: `None`, `"optimizer"` or `"parameters"`.
        recompute: Whether parts of the model are recomputed in the backward pass.
        parameters: Trainable weights; under `"parameters"` this device's shards.
        gathered: The weights of the largest layer, gathered while it is called.
        non_trainable: Weights that aren't trained, such as statistics and seeds.
        gradients: All gradients of a step; under `"parameters"` the shards of those that are reduced, and the whole of
            the one that isn't yet, at their peak.
        slots: The optimizer's variables.
        accumulators: Gradients that are accumulated over micro-batches.
        ema: Moving averages of the weights.
        activations: All other tensors of the forward and backward pass, at their peak.
        update: Tensors that the optimizer computes for its update, at their peak.
        total: The most that is held at once: at most the sum, as activations, gradients and the update are not at their
            largest at the same time.
    """

    shard: str | None
    recompute: bool
    parameters: int
    gathered: int
    non_trainable: int
    gradients: int
    slots: int
    accumulators: int
    ema: int
    activations: int
    update: int
    total: int


def breakdowns_of(
    model: Any, step: TracedStep, replicas: int, *, recompute: bool = False, least: int = MIN_SHARD_BYTES
) -> list[MemoryBreakdown]:
    """The bytes that a device holds, for each value of `shard`.

    Args:
        model: The model.
        step: Its traced step, of as many rows as a device has.
        replicas: Number of devices.
        recompute: Whether the step was traced with recomputation.
        least: The bytes of a variable from which it is cut into shards.
    """
    peaks = _peaks(step)
    return [_breakdown(model, step, peaks, shard, replicas, recompute, least) for shard in SHARDS]


def _breakdown(
    model: Any, step: TracedStep, peaks: Peaks, shard: str | None, replicas: int, recompute: bool, least: int
) -> MemoryBreakdown:
    of_weights = Sharding(replicas if shard == "parameters" else 1, least)
    of_state = Sharding(replicas if shard else 1, least)
    state = {
        kind: sum(of_state.bytes_of(variable) for variable in variables)
        for kind, variables in optimizer_variables(step.optimizers).items()
    }
    held = {
        "parameters": sum(of_weights.bytes_of(variable) for variable in model.trainable_variables),
        "non_trainable": sum(map(variable_bytes, model.non_trainable_variables)),
        **state,
    }
    cut = [each for each in step.gradients if not each.of_rows and of_weights.cuts(each.variable)]
    gathering = _peaks(step, {each.resource: variable_bytes(each.variable) for each in cut}) if cut else peaks
    gradients, most = _gradients_and_peak(step, gathering, of_weights)
    # An update runs on shards of the optimizer's variables.
    update = peaks.update // of_state.shards
    return MemoryBreakdown(
        shard,
        recompute,
        gathered=max(
            (_gathered_bytes(*each, of_weights) for each in _layers_with_gathered_weights(model, step)), default=0
        ),
        gradients=max(gradients),
        activations=max(peaks.activations),
        update=update,
        total=sum(held.values()) + max(most, gradients[-1] + update),
        **held,
    )


class Sharding(NamedTuple):
    """How variables are divided among devices.

    Attributes:
        shards: Into how many shards.
        least: The bytes of a variable from which it is cut.
    """

    shards: int
    least: int

    def cuts(self, variable: keras.Variable) -> bool:
        """Whether a variable is cut."""
        return self.shards > 1 and variable_bytes(variable) >= self.least

    def variable_bytes(self, variable: keras.Variable) -> int:
        """The bytes of a variable that a device holds."""
        size, elements = variable_bytes(variable), math.prod(variable.shape)
        return -(-elements // self.shards) * (size // elements) if self.cuts(variable) else size


def _peaks(step: TracedStep, gathered: Mapping[int | None, int] | None = None) -> Peaks:
    return step_peaks(step.block, [gradient.number for gradient in step.gradients], step.updates_from, gathered)


def _gradients_and_peak(step: TracedStep, peaks: Peaks, of_weights: Sharding) -> tuple[list[int], int]:
    """The bytes of gradients after each one's arrival, and when all are there; the most with activations until then."""
    by_number = {gradient.number: gradient for gradient in step.gradients}
    held, all_held, most = 0, [], peaks.activations[0]
    for number, activations in zip(peaks.gradients, peaks.activations[1:], strict=True):
        gradient = by_number[number]
        # Whole on each device until it is reduced, while the backward pass goes on.
        all_held.append(held + gradient.size)
        most = max(most, all_held[-1] + activations)
        # One of rows is a batch's, not the variable's.
        is_cut = not gradient.of_rows and of_weights.cuts(gradient.variable)
        held += -(-gradient.size // of_weights.shards) if is_cut else gradient.size
    return [*all_held, held], most


def _layers_with_gathered_weights(model: Any, step: TracedStep) -> Iterable[tuple[Any, list[keras.Variable]]]:
    """Layers with the trainable variables that are theirs and are gathered: not tables, of which rows are looked up."""
    tables = {id(gradient.variable) for gradient in step.gradients if gradient.of_rows}
    for layer in (model, *all_layers(model)):
        inner = {id(variable) for child in children(layer) for variable in child.trainable_variables}
        yield layer, [each for each in layer.trainable_variables if id(each) not in inner | tables]


def _gathered_bytes(layer: Any, variables: list[keras.Variable], of_weights: Sharding) -> int:
    # Gathered in the dtype that the layer computes in.
    size = tf.as_dtype(layer.compute_dtype).size
    return sum(math.prod(variable.shape) * size for variable in variables if of_weights.cuts(variable))
