"""Gaussian noise, added once to the gradient of each update."""

import math
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, sum_over_replicas

# The algorithm is named so that all devices draw the same numbers.
_ALGORITHM = "philox"
# Bits of a float64 between 0 and 1.
_BITS = 53


class GaussianNoise:
    """Fills the *transform* stage: adds noise to the gradient of an update, the same on every replica.

    Each draw is a function of the key, the number of the update and the place of the variable, so it doesn't matter in
    which order devices take them, and an update that is resumed has the noise that it would have had.

    Args:
        key: Returns an int64 tensor `(2,)`.
        position: The number of updates made with this key, which this counts: in no file, so no load takes it back.
        updates: The number of updates that the weights have behind them, which this counts.
        deviation: Returns the standard deviation, a number or a scalar.
        variables: Returns the model's trainable variables, which there are once it is built.
        secure: Whether to draw from the operating system instead.
        ended: Called after the draws of an update, with a draw of the standard normal distribution.
    """

    # XLA takes twice as long for it on CPUs.
    outside_xla = True

    def __init__(
        self,
        key: Callable[[], tf.Tensor],
        position: tf.Variable,
        updates: keras.Variable,
        deviation: Callable[[], Any],
        variables: Callable[[], list[keras.Variable]],
        *,
        secure: bool = False,
        ended: Callable[[tf.Tensor], None] | None = None,
    ):
        self.key, self.position, self.updates, self.variables = key, position, updates, variables
        self.deviation, self.secure, self.ended = deviation, secure, ended

    def __call__(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> list[tf.Tensor]:
        """The gradients with noise."""
        seed: Any = tf.random.fold_in(self.key(), tf.identity(self.position), alg=_ALGORITHM)
        deviation = tf.cast(self.deviation(), "float32")
        # The gradient of an embedding doesn't know its shape.
        shapes = [variable.shape for variable in variables]
        if self.secure:
            *draws, last = _same_everywhere([_from_system(shape) for shape in [*shapes, ()]])
            noise = [deviation * draw for draw in draws]
        else:
            places = {id(variable): place for place, variable in enumerate(self.variables())}
            noise = [
                _keyed(seed, places[id(variable)], shape, deviation)
                for variable, shape in zip(variables, shapes, strict=True)
            ]
            last = _keyed(seed, len(places), (), 1.0)
        noisy = [gradient + tf.cast(draw, gradient.dtype) for gradient, draw in zip(gradients, noise, strict=True)]
        with tf.control_dependencies(noisy):
            if self.ended:
                self.ended(last)
            self.position.assign_add(1)
            self.updates.assign_add(1)
        return noisy


def _keyed(seed: tf.Tensor, place: int, shape: Any, deviation: Any) -> tf.Tensor:
    """Independent draws of the normal distribution with mean 0 and a standard deviation, float32.

    Box and Muller's transform of numbers of 32 bits. `tf.random.stateless_normal` makes one number after another, and
    takes nearly twice as long as these vectorized operations.
    """
    own: Any = tf.random.fold_in(seed, place, alg=_ALGORITHM)
    count = math.prod(shape)
    # All numbers of 32 bits.
    whole: Any = {"minval": None, "maxval": None, "dtype": tf.uint32}
    bits: Any = tf.random.stateless_uniform([2, (count + 1) // 2], own, alg=_ALGORITHM, **whole)
    radius, angle = tf.unstack(tf.cast(bits, "float32"))
    # Never 0, of which there is no logarithm.
    length = deviation * tf.sqrt(-2.0 * tf.math.log((radius + 0.5) * 2.0**-32))
    angle *= 2.0**-32 * 2 * math.pi
    normals = tf.concat([length * tf.cos(angle), length * tf.sin(angle)], 0)
    return tf.reshape(normals[:count], shape)


def _same_everywhere(draws: list[tf.Tensor]) -> list[tf.Tensor]:
    """The sum over all replicas of independent draws, scaled to the variance of one."""
    if replica_count() == 1:
        return draws
    return sum_over_replicas([draw / replica_count() ** 0.5 for draw in draws])


def _from_system(shape: Any) -> tf.Tensor:
    drawn: Any = tf.numpy_function(lambda: system_normals(tuple(shape)), [], tf.float32, stateful=True)
    drawn.set_shape(shape)
    return drawn


def system_normals(shape: tuple[int, ...]) -> np.ndarray:
    """Independent draws of the standard normal distribution from the operating system's randomness, float32.

    Box and Muller's transform of numbers of 53 bits, computed in float64.
    """
    count = int(np.prod(shape))
    pairs = (count + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs) >> np.uint64(64 - _BITS)
    # Never 0, of which there is no logarithm.
    radius, angle = (bits + 0.5) / 2.0**_BITS
    lengths = np.sqrt(-2 * np.log(radius))
    normals = np.concatenate([lengths * np.cos(2 * np.pi * angle), lengths * np.sin(2 * np.pi * angle)])
    return normals[:count].reshape(shape).astype(np.float32)
