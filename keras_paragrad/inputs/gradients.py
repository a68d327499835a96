"""`input_gradients` and `hessian_vector_product`: first and second derivatives of a scalar per row."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.types import FitData
from keras_paragrad.inputs.function import Derivative, OutputChoice, RowFunction, refuse_missing_derivatives
from keras_paragrad.inputs.run import DerivativeOptions, differentiate
from keras_paragrad.inputs.selection import Wrt

_NO_DERIVATIVE = "TensorFlow has no second derivative of an operation of the model: {}. Use another one there."
# Gradient ops whose own derivative TensorFlow silently treats as zero.
_CONSTANT_GRADIENTS = {
    "FakeQuantWithMinMaxArgsGradient",
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    "ResizeBilinearGrad",
}


def input_gradients(
    model: keras.Model,
    x: FitData,
    output: OutputChoice = None,
    *,
    batch_size: int | None = None,
    wrt: Wrt = None,
    jit_compile: bool | str = "auto",
    stream: bool = False,
    verbose: int = 0,
) -> Any:
    """Per-row gradients of an output with respect to the inputs, in the memory of one chunk of rows.

    The model is called in inference mode. Each call compiles one function, which takes `batch_size` rows at a time; the
    last chunk is padded with its own rows. Under a strategy each replica takes an equal part of a chunk.

    Args:
        model: A Keras model in which no row affects another row's output.
        x: The inputs: arrays of shape `(rows, ...)`, nested as the model takes them; or batches of any size from a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator, as for `model.predict`, of any length.
        output: What to differentiate, a scalar per row. `None`: the model's only output. An integer: that index on the
            output's last axis, such as a class. Integer labels, one per row, of shape `(rows,)` or `(rows, 1)`: the
            entry of each row's own label. A string: the output of that name, or path as in `"left/score"`. A function
            of the outputs: must return a tensor of shape `(rows,)`. Labels require `x` to be arrays, not batches.
        batch_size: Rows per chunk, on all replicas together; memory depends on nothing else. If `None`, chosen from 1
            to 8192 so that a chunk takes a few hundred megabytes, which takes another trace of the model.
        wrt: What to differentiate with respect to: the name of an input, or its path or number; the name of a layer, or
            its path as in `"encoder/embedding"`, for what the layer gives when the model is called; or a list or dict
            of inputs. All inputs if `None`. `"embedding:0"` is the first call of a layer that is called several times.
        jit_compile: Whether to compile with XLA; `"auto"` follows the model.
        stream: Whether to return an iterator over the results of the chunks.
        verbose: 1 for a progress bar, 2 for one line at the end, 0 for neither.

    Returns:
        An array for each input, or of the layer, of the shape of what is differentiated by, in float32 (float64 if the
        input or the layer's output is), nested as the inputs or as `wrt`. With `stream=True`, an iterator of such
        results, some rows each.

    Raises:
        ValueError: An input is not real-valued, or the output does not depend on it; the output is not a scalar per
            row; two have the name; there are no rows; or an argument is invalid. The message says what to write.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import input_gradients
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="tanh")])
    >>> x = np.ones((1000, 8), "float32")
    >>> input_gradients(model, x, output=2).shape
    (1000, 8)
    >>> input_gradients(model, x, output=np.arange(1000) % 3).shape  # of each row's own class
    (1000, 8)
    >>> input_gradients(model, x, lambda y: y[:, 0] ** 2 + y[:, 1] ** 2).shape
    (1000, 8)
    >>> words = [keras.Input((5,)), keras.layers.Embedding(9, 4, name="table"), keras.layers.LSTM(1)]
    >>> input_gradients(keras.Sequential(words), np.ones((7, 5), "int32"), wrt="table").shape  # of each word's vector
    (7, 5, 4)

    Reference:
        Simonyan, Vedaldi and Zisserman, *Deep Inside Convolutional Networks*, 2013, https://arxiv.org/abs/1312.6034.
    """
    options = DerivativeOptions(output, wrt, batch_size, jit_compile, stream, verbose)
    return differentiate(model, x, [lambda function, free, _: Derivative(function.gradients(free))], options)


def hessian_vector_product(
    model: keras.Model,
    x: FitData,
    vector: FitData,
    output: OutputChoice = None,
    *,
    batch_size: int | None = None,
    wrt: Wrt = None,
    jit_compile: bool | str = "auto",
    stream: bool = False,
    verbose: int = 0,
) -> Any:
    """Per-row product of an output's Hessian with respect to the inputs and a vector, without forming the Hessian.

    Args:
        model: A Keras model in which no row affects another row's output.
        x: The inputs: arrays of shape `(rows, ...)`, nested as the model takes them.
        vector: The vectors: arrays of the same shapes as what is differentiated by, nested as the inputs or as `wrt`.
        output: What to differentiate, a scalar per row; see `input_gradients`.
        batch_size: Rows per chunk; see `input_gradients`, also for the arguments that follow.
        wrt: The inputs or the layer to differentiate with respect to.
        jit_compile: Whether to compile with XLA.
        stream: Whether to return an iterator over the results of the chunks.
        verbose: 1 for a progress bar.

    Returns:
        An array for each input, or of the layer, of its shape, nested as the inputs or as `wrt`. See `input_gradients`.

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
    options = DerivativeOptions(output, wrt, batch_size, jit_compile, stream, verbose)
    return differentiate(model, x, [_hessian_vector_product], options, extra=vector)


def _hessian_vector_product(function: RowFunction, free: list[tf.Tensor], extra: Sequence[tf.Tensor]) -> Derivative:
    """Each row's Hessian times its vector, in `extra`: the gradient of the derivative along that vector."""
    if [vector.shape for vector in extra] != [tensor.shape for tensor in free]:
        raise ValueError(
            f"A row of `vector` has shape {[tuple(vector.shape[1:]) for vector in extra]}, and a row of the inputs "
            f"{[tuple(tensor.shape[1:]) for tensor in free]}. Pass one array for each input, of its shape."
        )
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(free)
        with refuse_missing_derivatives(_NO_DERIVATIVE):
            gradients = function.gradients(free)
        pairs = zip(gradients, extra, strict=True)
        directional = tf.add_n(
            [tf.reduce_sum(gradient * tf.cast(vector, gradient.dtype)) for gradient, vector in pairs]
        )
    _check_second_derivatives(directional.graph)
    # An output that is linear in an input has no second derivative there: it is zero.
    with refuse_missing_derivatives(_NO_DERIVATIVE):
        products = outer.gradient(directional, free, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return Derivative([tf.convert_to_tensor(product) for product in products])


def _check_second_derivatives(graph: tf.Graph) -> None:
    """Refuses operations whose gradient TensorFlow takes for a constant."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    constant = sorted({node.op for node in nodes} & _CONSTANT_GRADIENTS)
    if constant:
        raise ValueError(
            f"TensorFlow has no derivative of {', '.join(constant)}, and would drop it from the Hessian. Resize "
            "outside the model, or quantize after differentiating."
        )
