"""What a device holds under each way to shard a model, from a traced step and the sizes of variables."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.layers import children
from keras_paragrad._keras.objects.model import all_layers
from keras_paragrad._keras.objects.unallocated import bytes_of, state_of
from keras_paragrad._keras.step.tracing import TracedStep
from keras_paragrad._keras.storage.partition import MIN_SHARD_BYTES
from keras_paragrad.sharding.liveness import Peaks, step_peaks

SHARDS = (None, "optimizer", "parameters")


@dataclasses.dataclass(frozen=True)
class Column:
    """Bytes per device under one value of `shard`.

    Attributes:
        shard: What is sharded: `None`, `"optimizer"` or `"parameters"`.
        recompute: Whether parts of the model are recomputed in the backward pass.
        parameters: Trainable weights; under `"parameters"` this device's shards.
        gathered: The weights of the largest layer, gathered while it is called.
        non_trainable: Weights that aren't trained, such as statistics and seeds.
        gradients: All gradients of a step; under `"parameters"` the shards, and the largest layer's before they are
            reduced.
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


def columns_of(
    model: Any, step: TracedStep, replicas: int, *, recompute: bool = False, least: int = MIN_SHARD_BYTES
) -> list[Column]:
    """The bytes that a device holds, for each value of `shard`.

    Args:
        model: The model.
        step: Its traced step, of as many rows as a device has.
        replicas: Number of devices.
        recompute: Whether the step was traced with recomputation.
        least: The bytes of a variable from which it is cut into shards.
    """
    peaks = step_peaks(step.block, [gradient.number for gradient in step.gradients], step.updates_from)
    return [_column(model, step, peaks, shard, replicas, recompute, least) for shard in SHARDS]


def _column(
    model: Any, step: TracedStep, peaks: Peaks, shard: str | None, replicas: int, recompute: bool, least: int
) -> Column:
    of_weights = Cutting(replicas if shard == "parameters" else 1, least)
    of_state = Cutting(replicas if shard else 1, least)
    state = {
        kind: sum(of_state.bytes_of(variable) for variable in variables)
        for kind, variables in state_of(step.optimizers).items()
    }
    held = {
        "parameters": sum(of_weights.bytes_of(variable) for variable in model.trainable_variables),
        "gathered": max((_gathered_bytes(*each, of_weights) for each in _layers(model, step)), default=0),
        "non_trainable": sum(map(bytes_of, model.non_trainable_variables)),
        **state,
    }
    gradients, at_peak = _gradients_and_peak(model, step, peaks, of_weights, of_state)
    return Column(
        shard,
        recompute,
        gradients=gradients,
        activations=max(peaks.activations),
        update=peaks.update // of_state.shards,
        total=sum(held.values()) + at_peak,
        **held,
    )


class Cutting(NamedTuple):
    """How variables are divided among devices.

    Attributes:
        shards: Into how many shards.
        least: The bytes of a variable from which it is cut.
    """

    shards: int
    least: int

    def cuts(self, variable: keras.Variable) -> bool:
        """Whether a variable is cut."""
        return self.shards > 1 and bytes_of(variable) >= self.least

    def bytes_of(self, variable: keras.Variable) -> int:
        """The bytes of a variable that a device holds."""
        size, elements = bytes_of(variable), math.prod(variable.shape)
        return -(-elements // self.shards) * (size // elements) if self.cuts(variable) else size


def _gradients_and_peak(
    model: Any, step: TracedStep, peaks: Peaks, of_weights: Cutting, of_state: Cutting
) -> tuple[int, int]:
    """The bytes of all gradients, and the most that gradients and activations take together."""
    by_number = {gradient.number: gradient for gradient in step.gradients}
    in_order = [by_number[number] for number in peaks.gradients]

    def kept(gradient):
        # A gradient of rows is a batch's, not the variable's.
        is_cut = not gradient.of_rows and of_weights.cuts(gradient.variable)
        return -(-gradient.size // of_weights.shards) if is_cut else gradient.size

    whole = 0
    if of_weights.shards > 1:
        sizes = {id(gradient.variable): gradient.size - kept(gradient) for gradient in in_order}
        whole = max((sum(sizes.get(id(each), 0) for each in own) for _, own in _layers(model, step)), default=0)
    held, most = 0, peaks.activations[0]
    for gradient, activations in zip(in_order, peaks.activations[1:], strict=True):
        held += kept(gradient)
        most = max(most, held + whole + activations)
    # An update runs on shards of the optimizer's variables.
    return held + whole, max(most, held + peaks.update // of_state.shards)


def _layers(model: Any, step: TracedStep) -> Iterable[tuple[Any, list[keras.Variable]]]:
    """Layers with the trainable variables that are theirs and are gathered: not tables, of which rows are looked up."""
    tables = {id(gradient.variable) for gradient in step.gradients if gradient.of_rows}
    for layer in (model, *all_layers(model)):
        inner = {id(variable) for child in children(layer) for variable in child.trainable_variables}
        yield layer, [each for each in layer.trainable_variables if id(each) not in inner | tables]


def _gathered_bytes(layer: Any, variables: list[keras.Variable], of_weights: Cutting) -> int:
    # Gathered in the dtype that the layer computes in.
    size = tf.as_dtype(layer.compute_dtype).size
    return sum(math.prod(variable.shape) * size for variable in variables if of_weights.cuts(variable))
