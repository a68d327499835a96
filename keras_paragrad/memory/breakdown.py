"""The memory of a device under each value of `shard`, from a traced step and the sizes of variables."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import children
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.variables import optimizer_variables, variable_bytes
from keras_paragrad.memory.liveness import Peaks, step_peaks
from keras_paragrad.memory.traced_step import TracedStep
from keras_paragrad.storage.sharding import MIN_SHARD_BYTES

SHARDS = (None, "optimizer", "parameters")
# Bytes that TensorFlow takes for its first step, besides tensors, and for each operation of its graph, as seen on CPUs.
_RUNTIME, _OF_OPERATION = 64 * 2**20, 32 * 2**10


@dataclasses.dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes per device under one value of `shard`.

    Attributes:
        shard: What is sharded: `None`, `"optimizer"` or `"parameters"`.
        parameters: Trainable weights; under `"parameters"` this device's shards.
        gathered: The weights of the largest layer, gathered for its call.
        non_trainable: Weights that aren't trained, such as statistics and seeds.
        gradients: The gradients of a step, at their peak; under `"parameters"`, shards of the reduced ones and one
            whole gradient.
        slots: The optimizer's variables.
        accumulators: Gradients accumulated over micro-batches.
        ema: Moving averages of the weights.
        activations: All other tensors of the forward and backward pass, at their peak.
        update: Tensors that the optimizer computes for its update, at their peak.
        graph: The graph and what TensorFlow takes for its first step; on a GPU, the host has them.
        total: The peak: at most the sum, as activations, gradients and the update peak at different times.
    """

    shard: str | None
    parameters: int
    gathered: int
    non_trainable: int
    gradients: int
    slots: int
    accumulators: int
    ema: int
    activations: int
    update: int
    graph: int
    total: int

    @property
    def held(self) -> int:
        """What batches of any size take: the variables, and gradients with their sums over slices."""
        variables = self.parameters + self.non_trainable + self.slots + self.accumulators + self.ema
        return variables + 2 * self.parameters + self.gathered + self.graph


def breakdowns_of(
    model: keras.Model, step: TracedStep, replicas: int, *, least: int = MIN_SHARD_BYTES
) -> list[MemoryBreakdown]:
    """The memory of a device for each value of `shard`; `step` has the rows of one device.

    Variables are sharded from `least` bytes on.
    """
    peaks = _peaks(step)
    return [_breakdown(model, step, peaks, shard, replicas, least) for shard in SHARDS]


def _breakdown(
    model: keras.Model, step: TracedStep, peaks: Peaks, shard: str | None, replicas: int, least: int
) -> MemoryBreakdown:
    """The bytes on a device under one value of `shard`; `peaks` are without gathered weights."""
    weight_sharding = Sharding(replicas if shard == "parameters" else 1, least)
    state_sharding = Sharding(replicas if shard else 1, least)
    state = {
        kind: sum(state_sharding.local_bytes(variable) for variable in variables)
        for kind, variables in optimizer_variables(step.optimizers).items()
    }
    # Logical CPU devices share a graph.
    on_gpu = bool(tf.config.get_visible_devices("GPU"))
    constant = {
        "parameters": sum(weight_sharding.local_bytes(variable) for variable in model.trainable_variables),
        "non_trainable": sum(map(variable_bytes, model.non_trainable_variables)),
        "graph": 0 if on_gpu else (_RUNTIME + _OF_OPERATION * step.block.size) // replicas,
        **state,
    }
    sharded = [
        gradient for gradient in step.gradients if not gradient.of_rows and weight_sharding.divides(gradient.variable)
    ]
    # Gathered weights are tensors of the step as well: they count in the total, and not in `activations`.
    peaks_with_gathered = (
        _peaks(step, {gradient.resource: variable_bytes(gradient.variable) for gradient in sharded})
        if sharded
        else peaks
    )
    gradients, backward_peak = _gradients_and_peak(step, peaks_with_gathered, weight_sharding)
    # An update works on shards of the optimizer's variables.
    update = peaks.update // state_sharding.shards
    return MemoryBreakdown(
        shard,
        gathered=_gathered_bytes(model, step, weight_sharding),
        gradients=max(gradients),
        activations=max(peaks.activations),
        update=update,
        total=sum(constant.values()) + max(backward_peak, gradients[-1] + update),
        **constant,
    )


class Sharding(NamedTuple):
    """How variables are divided among devices.

    Attributes:
        shards: Number of shards.
        least: The size of a variable, in bytes, from which it is sharded.
    """

    shards: int
    least: int

    def divides(self, variable: keras.Variable) -> bool:
        """Whether a variable is sharded."""
        return self.shards > 1 and variable_bytes(variable) >= self.least

    def local_bytes(self, variable: keras.Variable) -> int:
        """The bytes of a variable that a device holds."""
        size, elements = variable_bytes(variable), math.prod(variable.shape)
        return -(-elements // self.shards) * (size // elements) if self.divides(variable) else size


def _peaks(step: TracedStep, gathered: Mapping[int | None, int] | None = None) -> Peaks:
    """The step's peaks; `gathered` has the bytes of each sharded variable, by its resource, once it is gathered."""
    return step_peaks(step.block, [gradient.number for gradient in step.gradients], step.updates_from, gathered)


def _gradients_and_peak(step: TracedStep, peaks: Peaks, weight_sharding: Sharding) -> tuple[list[int], int]:
    """The bytes of all gradients as each arrives and at the end; and the peak of these with the activations."""
    by_number = {gradient.number: gradient for gradient in step.gradients}
    held, history, peak = 0, [], peaks.activations[0]
    for number, activations in zip(peaks.gradients, peaks.activations[1:], strict=True):
        gradient = by_number[number]
        # Whole on each device until it is reduced.
        history.append(held + gradient.size)
        peak = max(peak, history[-1] + activations)
        # A gradient of rows has the size of the batch, not of the variable.
        is_sharded = not gradient.of_rows and weight_sharding.divides(gradient.variable)
        held += -(-gradient.size // weight_sharding.shards) if is_sharded else gradient.size
    return [*history, held], peak


def _gathered_bytes(model: keras.Model, step: TracedStep, weight_sharding: Sharding) -> int:
    """The bytes of the layer whose gathered weights take the most; embedding tables are looked up instead."""
    tables = {id(gradient.variable) for gradient in step.gradients if gradient.of_rows}
    most = 0
    for layer in (model, *all_layers(model)):
        inner = {id(variable) for child in children(layer) for variable in child.trainable_variables}
        weights = [weight for weight in layer.trainable_variables if id(weight) not in inner | tables]
        # Gathered in the dtype that the layer computes in.
        entries = sum(math.prod(weight.shape) for weight in weights if weight_sharding.divides(weight))
        most = max(most, entries * tf.as_dtype(layer.compute_dtype).size)
    return most
