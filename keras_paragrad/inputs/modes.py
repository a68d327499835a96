"""Jacobians of a chunk of rows: one pass per input entry in forward mode, one per output entry in reverse mode."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_paragrad.inputs.function import Derivative, RowFunction
from keras_paragrad.inputs.refusal import refusing_what_has_no_derivative
from keras_paragrad.inputs.seeds import one_hot, over_seeds, width

_NO_DERIVATIVE = "TensorFlow can't differentiate a gradient: {}. Write mode='reverse'."
MODES = ("auto", "forward", "reverse", "vectorized")


class Jacobian(NamedTuple):
    """The Jacobian of a function of a chunk of rows; the passes for all seeds share one forward pass.

    A backward pass is linear in its seed, so its gradient with respect to the seed is a Jacobian-vector product:
    forward mode is reverse mode applied twice. Unlike `tf.autodiff.ForwardAccumulator`, this works with recurrent
    layers.

    Attributes:
        mode: One of `MODES`.
    """

    mode: str

    def __call__(self, function: RowFunction, free: list[tf.Tensor], extra: Sequence, check: tf.Tensor) -> Derivative:
        """Differentiates `function` at `free`; if `check` is true, also compares forward mode with reverse mode."""
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as outer:
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as inner:
                inner.watch(free)
                output = function(free)
                flat = tf.reshape(output, [output.shape[0], -1])

            def pull(seed: tf.Tensor) -> list[tf.Tensor]:
                return function.connected(inner.gradient(flat, free, [seed]))

            mode = _fewer_passes(flat, free) if self.mode == "auto" else self.mode
            seed = tf.random.stateless_normal(tf.shape(flat), (0, 0), dtype=flat.dtype)
            if mode == "forward":
                outer.watch(seed)
            with refusing_what_has_no_derivative(_NO_DERIVATIVE):
                pulled = pull(seed) if mode == "forward" else []

        sound = tf.constant(True)
        if mode == "vectorized":
            jacobians = [_vectorized(inner, flat, tensor) for tensor in free]
        elif mode == "reverse":
            stacks = over_seeds(lambda index: pull(one_hot(flat, index)), width(flat), free)
            jacobians = [tf.transpose(stack, [1, 0, *range(2, stack.shape.rank)]) for stack in stacks]
        else:
            jacobians = [_pushed(outer, seed, *pair) for pair in zip(pulled, free, strict=True)]
            tolerance = 1e-3 if function.model.compute_dtype in ("float32", "float64") else 0.1
            sound = tf.cond(check, lambda: _error(jacobians, seed, pull(seed)) < tolerance, lambda: sound)
        shapes = [[*output.shape, *tensor.shape[1:]] for tensor in free]
        return Derivative([tf.reshape(*pair) for pair in zip(jacobians, shapes, strict=True)], sound)


def _fewer_passes(flat: tf.Tensor, free: Sequence[tf.Tensor]) -> str:
    # A pass takes about as long in either mode: see the crossover in docs/benchmarks/input_gradients.md.
    return "forward" if sum(width(tensor) for tensor in free) < width(flat) else "reverse"


def _pushed(tape: tf.GradientTape, seed: tf.Tensor, pulled: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Pushes forward one input entry at a time: a tensor of shape `(rows, outputs, inputs)`."""

    def push(index) -> list:
        with refusing_what_has_no_derivative(_NO_DERIVATIVE):
            (derivative,) = tape.gradient(pulled, [seed], [one_hot(tensor, index)])
        if derivative is None:
            raise ValueError("TensorFlow can't differentiate a gradient in this model. Write mode='reverse'.")
        return [derivative]

    (stack,) = over_seeds(push, width(tensor), [seed])
    return tf.transpose(stack, [1, 2, 0])


def _vectorized(tape: tf.GradientTape, flat: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    try:
        return tape.batch_jacobian(flat, tensor)
    except ValueError as error:
        raise ValueError("TensorFlow can't vectorize an operation of the model. Write mode='reverse'.") from error


def _error(jacobians: Sequence[tf.Tensor], seed: tf.Tensor, pulled: Sequence[tf.Tensor]) -> tf.Tensor:
    """The largest difference from reverse mode along one seed, relative to the largest entry.

    TensorFlow treats a gradient without a registered derivative, such as that of bilinear resizing, as a constant.
    """
    errors = []
    for jacobian, expected in zip(jacobians, pulled, strict=True):
        expected = tf.cast(tf.reshape(expected, [seed.shape[0], -1]), "float32")
        found = tf.einsum("ro,roi->ri", tf.cast(seed, "float32"), tf.cast(jacobian, "float32"))
        errors.append(tf.math.divide_no_nan(tf.reduce_max(abs(found - expected)), tf.reduce_max(abs(expected))))
    return tf.reduce_max(errors)
