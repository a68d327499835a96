"""`input_gradients`: the gradient of one number a row with respect to the inputs of that row."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.inputs.derivative import Derivative
from keras_paragrad.inputs.function import RowFunction
from keras_paragrad.inputs.options import DerivativeOptions
from keras_paragrad.inputs.run import differentiate


def input_gradients(
    model: keras.Model,
    x: Any,
    output: str | int | Sequence[int] | np.ndarray | tf.Tensor | Callable[[Any], Any] | None = None,
    *,
    batch_size: int | None = None,
    wrt: Any = None,
    jit_compile: bool | str = "auto",
    out: str | os.PathLike | Any = None,
    stream: bool = False,
    verbose: int = 0,
) -> Any:
    """Gradients of an output with respect to the inputs, row by row, in the memory of one chunk of rows.

    The model is called for inference. One function is compiled in each call, and takes `batch_size` rows at a time; the
    last chunk is filled up with its own rows. Under a strategy each replica takes an equal part of a chunk.

    Args:
        model: A Keras model, in which no row has a part in another's output.
        x: The inputs: arrays of shape `(rows, ...)`, nested as the model takes them; or batches of any size from a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator, as for `model.predict`, of any length.
        output: What to differentiate, one number a row: the model's one output if `None`; the entry of that number on
            its last axis, such as a class; with an integer label for each row, of shape `(rows,)` or `(rows, 1)`, the
            entry of each row's own label; the output of that name; or a function of the outputs that returns a tensor
            of shape `(rows,)`. Labels go with arrays, and are refused with batches.
        batch_size: Rows at a time, on all replicas together. Memory grows with it, and with nothing else. If `None`,
            chosen from 1 to 8192, so that a chunk takes some hundred megabytes: the model is traced once more for that.
        wrt: The inputs to differentiate with respect to: the name of one, or a list or dict of names; all if `None`.
        jit_compile: Whether to compile with XLA; if `"auto"`, as the model is.
        out: Files to write to instead of memory: the path of a `.npy` file, or paths nested as the result.
        stream: Whether to return an iterator of the results of each chunk.
        verbose: 1 for a progress bar, 2 for one line at the end, 0 for neither.

    Returns:
        An array for each input, of its shape and in float32 (float64 if the model's input is), nested as the inputs or
        as `wrt`; mapped from its file to read, if `out` is given. With `stream=True`, an iterator of such, some rows
        each.

    Raises:
        ValueError: An input is not made of real numbers, or has no part in the output; the output is not one number a
            row; there are no rows; or an argument is none of the above. The message says what to write.

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

    Reference:
        Simonyan, Vedaldi and Zisserman, *Deep Inside Convolutional Networks*, 2013, https://arxiv.org/abs/1312.6034.
    """
    options = DerivativeOptions(output, wrt, batch_size, jit_compile, out, stream, verbose)
    return differentiate(model, x, [_gradient], options)


def _gradient(function: RowFunction, free: list[tf.Tensor], beside: Sequence, check: tf.Tensor) -> Derivative:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(free)
        values = function.values(free)
    return Derivative(function.connected(tape.gradient(values, free)))
