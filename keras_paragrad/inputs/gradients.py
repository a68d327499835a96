"""`input_gradients`: the gradient of a scalar per row with respect to that row's inputs."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.inputs.function import Derivative, RowFunction
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
    """Per-row gradients of an output with respect to the inputs, in the memory of one chunk of rows.

    The model is called in inference mode. Each call compiles one function, which takes `batch_size` rows at a time; the
    last chunk is padded with its own rows. Under a strategy each replica takes an equal part of a chunk.

    Args:
        model: A Keras model in which no row affects another row's output.
        x: The inputs: arrays of shape `(rows, ...)`, nested as the model takes them; or batches of any size from a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator, as for `model.predict`, of any length.
        output: What to differentiate, a scalar per row. `None`: the model's only output. An integer: that index on the
            output's last axis, such as a class. Integer labels, one per row, of shape `(rows,)` or `(rows, 1)`: the
            entry of each row's own label. A string: the output of that name. A function of the outputs: must return a
            tensor of shape `(rows,)`. Labels require `x` to be arrays, not batches.
        batch_size: Rows per chunk, on all replicas together; memory depends on nothing else. If `None`, chosen from 1
            to 8192 so that a chunk takes a few hundred megabytes, which takes another trace of the model.
        wrt: The inputs to differentiate with respect to: a name, or a list or dict of names; all if `None`.
        jit_compile: Whether to compile with XLA; `"auto"` follows the model.
        out: Files to write the results to: the path of a `.npy` file, or paths nested as the result.
        stream: Whether to return an iterator over the results of the chunks.
        verbose: 1 for a progress bar, 2 for one line at the end, 0 for neither.

    Returns:
        An array for each input, of its shape, in float32 (float64 if the model's input is), nested as the inputs or as
        `wrt`; memory-mapped read-only if `out` is given. With `stream=True`, an iterator of such results, some rows
        each.

    Raises:
        ValueError: An input is not real-valued, or the output does not depend on it; the output is not a scalar per
            row; there are no rows; or an argument is invalid. The message says what to write.

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


def _gradient(function: RowFunction, free: list[tf.Tensor], extra: Sequence, check: tf.Tensor) -> Derivative:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(free)
        values = function.values(free)
    return Derivative(function.connected(tape.gradient(values, free)))
