"""`input_jacobian`: the derivatives of all outputs of a row with respect to that row's inputs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_choice
from keras_paragrad.compat.types import FitData
from keras_paragrad.inputs.function import Derivative, OutputChoice, RowFunction, refuse_missing_derivatives
from keras_paragrad.inputs.run import DerivativeOptions, differentiate
from keras_paragrad.inputs.selection import Wrt

MODES = ("auto", "forward", "reverse")
_NO_DERIVATIVE = "TensorFlow can't differentiate a gradient: {}. Write mode='reverse'."
# Passes side by side keep the cores busy. More than four were no faster, and take more memory.
_PARALLEL_PASSES = 4


def input_jacobian(
    model: keras.Model,
    x: FitData,
    mode: str = "auto",
    *,
    output: OutputChoice = None,
    batch_size: int | None = None,
    wrt: Wrt = None,
    jit_compile: bool | str = "auto",
    stream: bool = False,
    verbose: int = 0,
) -> Any:
    """Per-row Jacobians of an output with respect to the inputs, in the memory of one chunk of rows.

    Forward mode takes one pass per input entry of a row, reverse mode one per output entry. Both loop inside one
    compiled function and share one forward pass.

    Args:
        model: A Keras model in which no row affects another row's output.
        x: The inputs; see `input_gradients`.
        mode: `"forward"` or `"reverse"`. `"auto"`: forward if a row has fewer input than output entries and the model
            supports forward mode, otherwise reverse.
        output: What to differentiate; see `input_gradients`. Here it may be of any shape `(rows, ...)`.
        batch_size: Rows per chunk, on all replicas together. A chunk's Jacobians have `batch_size` x outputs x inputs
            entries. If `None`, chosen by the memory that a row takes; see `input_gradients`.
        wrt: The inputs or the layer to differentiate with respect to; see `input_gradients`.
        jit_compile: Whether to compile with XLA; `"auto"` follows the model.
        stream: Whether to return an iterator over the results of the chunks.
        verbose: 1 for a progress bar, 2 for one line at the end, 0 for neither.

    Returns:
        An array of shape `(rows, *output_shape, *input_shape)` for each input, or of the layer, nested as the inputs or
        as `wrt`. See `input_gradients`.

    Raises:
        ValueError: As for `input_gradients`; or forward mode is requested and some gradient in the model is not
            differentiable.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import input_jacobian
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100, activation="tanh")])
    >>> input_jacobian(model, np.ones((1000, 8), "float32")).shape
    (1000, 100, 8)

    Reference:
        Griewank and Walther, *Evaluating Derivatives*, 2nd edition, SIAM 2008, chapter 3.
    """
    check_choice("mode", mode, MODES)
    options = DerivativeOptions(output, wrt, batch_size, jit_compile, stream, verbose)
    methods = [functools.partial(_jacobian, each) for each in (("auto", "reverse") if mode == "auto" else (mode,))]
    return differentiate(model, x, methods, options)


def _jacobian(mode: str, function: RowFunction, free: list[tf.Tensor], extra: Sequence[Any]) -> Derivative:
    """The Jacobian of a function of a chunk of rows; `mode` is one of `MODES`.

    A *seed* is what a backward pass starts from: a factor for each output entry of each row. The passes for all seeds
    share one forward pass. A backward pass is linear in its seed, so its gradient with respect to the seed is a
    Jacobian-vector product: forward mode is reverse mode applied twice. Unlike `tf.autodiff.ForwardAccumulator`, this
    works with recurrent layers.
    """
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as outer:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as inner:
            inner.watch(free)
            output = function(free)
            flat = tf.reshape(output, [output.shape[0], -1])

        def pull(seed: tf.Tensor) -> list[tf.Tensor]:
            return function.check_connected(inner.gradient(flat, free, [seed]))

        if mode == "auto":
            # A pass takes about as long in either mode: see the crossover in docs/benchmarks/per_example.md.
            mode = "forward" if sum(map(_row_size, free)) < _row_size(flat) else "reverse"
        seed = tf.random.stateless_normal(tf.shape(flat), (0, 0), dtype=flat.dtype)
        if mode == "forward":
            outer.watch(seed)
        with refuse_missing_derivatives(_NO_DERIVATIVE):
            pulled = pull(seed) if mode == "forward" else []

    is_valid = tf.constant(True)
    if mode == "reverse":
        stacks = _map_seeds(lambda index: pull(_one_hot_seed(flat, index)), _row_size(flat), free)
        jacobians = [tf.transpose(stack, [1, 0, *range(2, stack.shape.rank)]) for stack in stacks]
    else:
        jacobians = [_push_forward(outer, seed, *pair) for pair in zip(pulled, free, strict=True)]
        tolerance = 1e-3 if function.model.compute_dtype in ("float32", "float64") else 0.1
        is_valid = _error(jacobians, seed, pulled) < tolerance
    shapes = [[*output.shape, *tensor.shape[1:]] for tensor in free]
    return Derivative([tf.reshape(*pair) for pair in zip(jacobians, shapes, strict=True)], is_valid)


def _push_forward(tape: tf.GradientTape, seed: tf.Tensor, pulled: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """The Jacobian `(rows, outputs, inputs)` of the flat output by `tensor`, one input entry per pass.

    `tape` has recorded the backward pass from any seed, as it is linear in it, to the gradient `pulled`.
    """

    def push(index: tf.Tensor) -> list[tf.Tensor]:
        with refuse_missing_derivatives(_NO_DERIVATIVE):
            (derivative,) = tape.gradient(pulled, [seed], [_one_hot_seed(tensor, index)])
        if derivative is None:
            raise ValueError("TensorFlow can't differentiate a gradient in this model. Write mode='reverse'.")
        return [tf.convert_to_tensor(derivative)]

    (stack,) = _map_seeds(push, _row_size(tensor), [seed])
    return tf.transpose(stack, [1, 2, 0])


def _error(jacobians: Sequence[tf.Tensor], seed: tf.Tensor, pulled: Sequence[tf.Tensor]) -> tf.Tensor:
    """The largest difference between the modes along one seed, relative to the largest entry.

    `pulled` are the gradients from the seed by reverse mode. TensorFlow treats a gradient without a registered
    derivative, such as bilinear resizing's, as a constant.
    """
    errors = []
    for jacobian, expected in zip(jacobians, pulled, strict=True):
        expected = tf.cast(tf.reshape(expected, [seed.shape[0], -1]), "float32")
        product = tf.einsum("ro,roi->ri", tf.cast(seed, "float32"), tf.cast(jacobian, "float32"))
        errors.append(tf.math.divide_no_nan(tf.reduce_max(abs(product - expected)), tf.reduce_max(abs(expected))))
    return tf.reduce_max(errors)


def _row_size(tensor: tf.Tensor) -> int:
    """The number of entries of a row."""
    count = tensor.shape[1:].num_elements()
    assert count is not None, "the number of rows and their shape are known while tracing"
    return count


def _one_hot_seed(like: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """A tensor like `like` that is one at entry `index` of each row and zero elsewhere."""
    row = tf.one_hot(index, _row_size(like), dtype=like.dtype)
    return tf.broadcast_to(tf.reshape(row, [1, *like.shape[1:]]), like.shape)


def _map_seeds(
    run_pass: Callable[[tf.Tensor], list[tf.Tensor]], count: int, like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Runs a pass for each seed by its index, some in parallel; stacks their results, `(count, ...)` each.

    `like` has a tensor of the shape and dtype of each result of a pass.
    """
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in like]
    return tf.map_fn(run_pass, tf.range(count), fn_output_signature=specs, parallel_iterations=_PARALLEL_PASSES)
