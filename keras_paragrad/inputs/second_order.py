"""`hessian_vector_product`: the derivative of an input gradient along a direction."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.inputs.function import Derivative, RowFunction
from keras_paragrad.inputs.options import DerivativeOptions
from keras_paragrad.inputs.refusal import refusing_what_has_no_derivative
from keras_paragrad.inputs.rows import is_batched
from keras_paragrad.inputs.run import differentiate


def hessian_vector_product(
    model: keras.Model,
    x: Any,
    vector: Any,
    output: str | int | Sequence[int] | np.ndarray | tf.Tensor | Callable[[Any], Any] | None = None,
    *,
    batch_size: int | None = None,
    wrt: Any = None,
    jit_compile: bool | str = "auto",
    out: str | os.PathLike | Any = None,
    stream: bool = False,
    verbose: int = 0,
) -> Any:
    """Per-row product of an output's Hessian with respect to the inputs and a vector, without forming the Hessian.

    Args:
        model: A Keras model in which no row affects another row's output.
        x: The inputs: arrays of shape `(rows, ...)`, nested as the model takes them.
        vector: The vectors: arrays of the same shapes as the differentiated inputs, nested as these or as `wrt`.
        output: What to differentiate, a scalar per row; see `input_gradients`.
        batch_size: Rows per chunk; see `input_gradients`, also for the arguments that follow.
        wrt: The inputs to differentiate with respect to.
        jit_compile: Whether to compile with XLA.
        out: Files to write the results to.
        stream: Whether to return an iterator over the results of the chunks.
        verbose: 1 for a progress bar.

    Returns:
        An array for each input, of its shape, nested as the inputs or as `wrt`. See `input_gradients`.

    Raises:
        ValueError: As for `input_gradients`; or `vector` has the wrong shape; or TensorFlow would silently drop the
            second derivative of an operation in the model.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import hessian_vector_product
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="tanh")])
    >>> x = np.ones((1000, 8), "float32")
    >>> hessian_vector_product(model, x, vector=np.ones_like(x)).shape
    (1000, 8)

    Reference:
        Pearlmutter, *Fast Exact Multiplication by the Hessian*, Neural Computation 6(1), 1994.
    """
    if is_batched(x):
        raise ValueError(f"`x` is a {type(x).__name__}, and `vector` must match it row by row. Pass arrays for both.")
    options = DerivativeOptions(output, wrt, batch_size, jit_compile, out, stream, verbose)
    return differentiate(model, x, [_hessian_times_vector], options, extra=vector)


_NO_DERIVATIVE = "TensorFlow has no second derivative of an operation of the model: {}. Use another one there."


def _hessian_times_vector(
    function: RowFunction, free: list[tf.Tensor], extra: Sequence[tf.Tensor], check: tf.Tensor
) -> Derivative:
    if [vector.shape for vector in extra] != [tensor.shape for tensor in free]:
        raise ValueError(
            f"A row of `vector` has shape {[tuple(vector.shape[1:]) for vector in extra]}, and a row of the inputs "
            f"{[tuple(tensor.shape[1:]) for tensor in free]}. Pass one array for each input, of its shape."
        )
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(free)
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(free)
            values = function.values(free)
        with refusing_what_has_no_derivative(_NO_DERIVATIVE):
            gradients = function.connected(inner.gradient(values, free))
        along = tf.add_n(
            [
                tf.reduce_sum(gradient * tf.cast(vector, gradient.dtype))
                for gradient, vector in zip(gradients, extra, strict=True)
            ]
        )
    _check_second_derivatives(along.graph)
    # An output that is linear in an input has no second derivative there: it is zero.
    with refusing_what_has_no_derivative(_NO_DERIVATIVE):
        products = outer.gradient(along, free, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return Derivative([tf.convert_to_tensor(product) for product in products])


# Gradient ops whose own derivative TensorFlow silently treats as zero.
CONSTANT_GRADIENTS = {
    "FakeQuantWithMinMaxArgsGradient",
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    "ResizeBilinearGrad",
}


def _check_second_derivatives(graph: tf.Graph) -> None:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    found = sorted({node.op for node in nodes} & CONSTANT_GRADIENTS)
    if found:
        raise ValueError(
            f"TensorFlow has no derivative of {', '.join(found)}, and would drop it from the Hessian. Resize "
            "outside the model, or quantize after differentiating."
        )
