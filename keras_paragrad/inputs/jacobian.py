"""`input_jacobian`: the derivatives of all the outputs of a row with respect to the inputs of that row."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_choice
from keras_paragrad.inputs.modes import MODES, Jacobian
from keras_paragrad.inputs.options import DerivativeOptions
from keras_paragrad.inputs.run import differentiate


def input_jacobian(
    model: keras.Model,
    x: Any,
    mode: str = "auto",
    *,
    output: str | int | Sequence[int] | np.ndarray | tf.Tensor | Callable[[Any], Any] | None = None,
    batch_size: int | None = None,
    wrt: Any = None,
    jit_compile: bool | str = "auto",
    out: str | os.PathLike | Any = None,
    stream: bool = False,
    verbose: int = 0,
) -> Any:
    """Jacobians of an output with respect to the inputs, row by row, in the memory of one chunk of rows.

    Forward mode takes one pass for each number that a row puts in, reverse mode one for each that it puts out. Both
    loop inside one compiled function, over a forward pass that is made once.

    Args:
        model: A Keras model, in which no row has a part in another's output.
        x: The inputs; see `input_gradients`.
        mode: `"forward"`, `"reverse"`, or `"auto"`: forward if a row has fewer numbers in than out, unless forward mode
            can't be had for a step of the model. Or `"vectorized"`: all outputs at once, by `tf.vectorized_map` under
            XLA, which takes a chunk's memory once for each output.
        output: What to differentiate; see `input_gradients`. Here it may be of any shape `(rows, ...)`.
        batch_size: Rows at a time, on all replicas together. A chunk's Jacobians are `batch_size` times the numbers out
            times the numbers in. If `None`, chosen by the memory that a row takes; see `input_gradients`.
        wrt: The inputs to differentiate with respect to; see `input_gradients`.
        jit_compile: Whether to compile with XLA; if `"auto"`, as the model is, and with `mode="vectorized"` always.
        out: Files to write to instead of memory; see `input_gradients`.
        stream: Whether to return an iterator of the results of each chunk.
        verbose: 1 for a progress bar, 2 for one line at the end, 0 for neither.

    Returns:
        An array of shape `(rows, *output_shape, *input_shape)` for each input, nested as the inputs or as `wrt`. See
        `input_gradients`.

    Raises:
        ValueError: As for `input_gradients`; or forward mode is asked for, and some gradient in the model has no
            derivative of its own, or XLA can't compile the model vectorized.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import input_jacobian
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100, activation="tanh")])
    >>> input_jacobian(model, np.ones((1000, 8), "float32")).shape
    (1000, 100, 8)

    Reference:
        Griewank and Walther, *Evaluating Derivatives*, 2nd edition, SIAM 2008, chapter 3.
    """
    if check_choice("mode", mode, MODES) == "vectorized":
        if jit_compile is False:
            raise ValueError(
                "mode='vectorized' needs XLA: without it, TensorFlow's batched matrix products write past their "
                "memory. Leave jit_compile out, or write mode='reverse'."
            )
        jit_compile = True
    options = DerivativeOptions(output, wrt, batch_size, jit_compile, out, stream, verbose)
    ways = [Jacobian("auto"), Jacobian("reverse")] if mode == "auto" else [Jacobian(mode)]
    try:
        return differentiate(model, x, ways, options)
    except tf.errors.InvalidArgumentError as error:
        if mode != "vectorized":
            raise
        raise ValueError(
            "XLA can't compile mode='vectorized' for this model; recurrent layers are such a case. Write "
            "mode='reverse'."
        ) from error
