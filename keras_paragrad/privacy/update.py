"""A private update fills two stages: *split*, with physical batches, and *transform*, with Gaussian noise.

Physical batches are the equal parts of an update's batch that are computed one after the other, to fit the memory.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.accumulation.slices import Slices
from keras_paragrad.compat.collectives import replica_count, sum_over_replicas
from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.calls.divided import RowSlices
from keras_paragrad.engine.losses.logs import has_metrics
from keras_paragrad.engine.step.batch_part import BatchPart, sum_slices
from keras_paragrad.engine.step.gradient import Gradient, StepContext, in_function, is_slower_in_xla_loop
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.privacy.sampling import present_rows

# Rows of a physical batch are a multiple of this, for the kernels.
_ROWS = 8
# Physical batches have room for draws of up to this many standard deviations above the expected batch size. One update
# in 44 is larger and takes one batch more; with more room, every update would compute more rows.
_USUAL = 2.0
# All devices draw the same numbers by an algorithm that is named.
_ALGORITHM = "philox"
# Random bits of a float64 between 0 and 1.
_BITS = 53


def rows_of_update(
    needed: int, expected: int, rate: float, limit: int | None = None, replicas: int = 1
) -> tuple[int, int]:
    """Rows of an update's padded batch, at least `needed`, and of each physical batch, at most `limit`.

    Rows are counted over all replicas; `expected` is the expected batch size, and `rate` the sampling rate.

    Physical batches without a drawn row are not computed, so their size is chosen for most draws to fill a whole number
    of them.
    """
    if limit is not None and limit % replicas:
        raise ValueError(
            f"`physical_batch_size` is {limit}, and can't be divided among {replicas} replicas. Write "
            f"physical_batch_size={_round_up(limit, replicas)}."
        )
    usual = min(needed, math.ceil(expected + _USUAL * (expected * (1 - rate)) ** 0.5))
    parts = 1 if limit is None else -(-usual // limit)
    physical = _round_up(-(-usual // parts), _ROWS * replicas)
    physical = physical if limit is None else min(physical, limit)
    return _round_up(needed, physical), physical


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class PhysicalBatches(Slices):
    """Fills the *split* stage with the equal physical batches of an update, without batches that have no drawn row.

    Their number shows in the time of an update, and in nothing that is saved.
    """

    private = True

    @property
    def refusal_prefix(self) -> str:
        """The first sentence of the error for a model that allows no physical batches."""
        return "An update can't be computed in physical batches."

    def __call__(self, context: StepContext, data: Batch) -> Gradient:
        """Sums the gradients of the physical batches that have drawn rows."""
        model = context.model
        drawn = tf.math.count_nonzero(present_rows(data), dtype=tf.int32)
        # At least one batch, as the gradient of weight regularizers belongs to an empty draw too.
        batches = tf.maximum(1, -(-drawn // self.size))
        size = self._even_size(drawn, batches) if _allows_any_batch_size(model) else self.size
        rows = batches * size
        self.build(context, data)

        # The batch is padded, so no slice ends beyond it.
        slices = RowSlices(size, full=batches)

        def accumulate(data: Batch, **how: Any) -> BatchPart:
            return sum_slices(context, data, slices, rows, alike=True, **how)

        with model.per_example.averaging(rows * replica_count()):
            # Metrics are updated with the drawn rows alone, whose number is dynamic: XLA can't compile that.
            if _by_xla(model) and not has_metrics(model) and not is_slower_in_xla_loop(model):
                # One call of a compiled loop is faster than a compiled call for each physical batch.
                total = in_function(functools.partial(accumulate, by_xla=False))(data)
            else:
                total = accumulate(data)
        # `averaging` already corrects for how many rows this replica computed, so replicas count equally.
        return total.finish().counting_as_one()

    def _even_size(self, drawn: tf.Tensor, batches: tf.Tensor) -> tf.Tensor:
        """The fewest rows per physical batch that hold the drawn ones."""
        return tf.minimum(self.size, tf.maximum(1, -(-drawn // (batches * _ROWS))) * _ROWS)


def _by_xla(model: keras.Model) -> bool:
    """Whether XLA compiles the gradient, without the noise."""
    return StepBuilder.of(model).stages.by_xla_alone(model, replica_count())


def _allows_any_batch_size(model: keras.Model) -> bool:
    """Whether the size of physical batches may differ between updates."""
    # XLA would compile again for each size.
    if _by_xla(model):
        return False
    # A model built from symbolic inputs may have a fixed batch size; of others nothing is known.
    inputs = getattr(model.per_example.layer, "inputs", None)
    return bool(inputs) and all(input_.shape[0] is None for input_ in inputs)


class GaussianNoise:
    """Fills the *transform* stage: adds noise to the gradient of an update, the same on every replica.

    Each draw is a function of the key, the update's number and the variable's index. So it doesn't depend on the order
    in which devices draw, and a resumed update gets the noise that it would have got.
    `position` counts the updates made with the key, and `updates` those of the weights. `secure` draws from the
    operating system instead. `on_end` gets a draw of the standard normal distribution at the end of an update.
    """

    # XLA takes twice as long for it on CPUs.
    outside_xla = True

    def __init__(
        self,
        key: Callable[[], tf.Tensor],
        position: tf.Variable,
        updates: keras.Variable,
        deviation: Callable[[], tf.Tensor | float],
        variables: Callable[[], list[keras.Variable]],
        *,
        secure: bool = False,
        on_end: Callable[[tf.Tensor], None] | None = None,
    ):
        self.key, self.position, self.updates, self.variables = key, position, updates, variables
        self.deviation, self.secure, self.on_end = deviation, secure, on_end

    def __call__(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> list[tf.Tensor]:
        """The gradients with noise; counts the update."""
        seed: Any = tf.random.fold_in(self.key(), tf.identity(self.position), alg=_ALGORITHM)
        deviation = tf.cast(self.deviation(), "float32")
        # An embedding's gradient doesn't know its shape.
        shapes = [variable.shape for variable in variables]
        if self.secure:
            *draws, scalar_draw = _reduce_draws([_system_draw(shape) for shape in [*shapes, ()]])
            noise = [deviation * draw for draw in draws]
        else:
            indices = {id(variable): index for index, variable in enumerate(self.variables())}
            noise = [
                _keyed_normals(seed, indices[id(variable)], shape, deviation)
                for variable, shape in zip(variables, shapes, strict=True)
            ]
            scalar_draw = _keyed_normals(seed, len(indices), (), 1.0)
        noisy = [gradient + tf.cast(draw, gradient.dtype) for gradient, draw in zip(gradients, noise, strict=True)]
        with tf.control_dependencies(noisy):
            if self.on_end:
                self.on_end(scalar_draw)
            self.position.assign_add(1)
            self.updates.assign_add(1)
        return noisy


def _keyed_normals(seed: tf.Tensor, index: int, shape: Sequence[int], deviation: tf.Tensor | float) -> tf.Tensor:
    """Independent normal draws with mean 0 and a standard deviation, float32.

    The Box-Muller transform of 32-bit integers. `tf.random.stateless_normal` draws sequentially, and takes nearly twice
    as long as these vectorized operations.
    """
    key: Any = tf.random.fold_in(seed, index, alg=_ALGORITHM)
    count = math.prod(shape)
    full_range: dict[str, Any] = {"minval": None, "maxval": None, "dtype": tf.uint32}
    bits = tf.random.stateless_uniform([2, (count + 1) // 2], key, alg=_ALGORITHM, **full_range)
    radius, angle = tf.unstack(tf.cast(bits, "float32"))
    # Half a step above 0, where the logarithm is infinite.
    length = deviation * tf.sqrt(-2.0 * tf.math.log((radius + 0.5) * 2.0**-32))
    angle *= 2.0**-32 * 2 * math.pi
    normals = tf.concat([length * tf.cos(angle), length * tf.sin(angle)], 0)
    return tf.reshape(normals[:count], shape)


def _reduce_draws(draws: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums the replicas' independent draws, scaled to the variance of one, so that all replicas have the same."""
    if replica_count() == 1:
        return draws
    return sum_over_replicas([draw / replica_count() ** 0.5 for draw in draws])


def _system_draw(shape: Sequence[int]) -> tf.Tensor:
    draw = tf.numpy_function(lambda: system_normals(tuple(shape)), [], tf.float32, stateful=True)
    draw.set_shape(shape)
    return draw


def system_normals(shape: tuple[int, ...]) -> np.ndarray:
    """Independent standard normal draws from the operating system's randomness, float32.

    The Box-Muller transform of 53-bit integers, computed in float64.
    """
    count = int(np.prod(shape))
    pairs = (count + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs) >> np.uint64(64 - _BITS)
    radius, angle = (bits + 0.5) / 2.0**_BITS
    lengths = np.sqrt(-2 * np.log(radius))
    normals = np.concatenate([lengths * np.cos(2 * np.pi * angle), lengths * np.sin(2 * np.pi * angle)])
    return normals[:count].reshape(shape).astype(np.float32)
