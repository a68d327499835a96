"""`input_jacobian`: the derivatives of all outputs of a row with respect to that row's inputs."""

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
    """Per-row Jacobians of an output with respect to the inputs, in the memory of one chunk of rows.

    Forward mode takes one pass per input entry of a row, reverse mode one per output entry. Both loop inside one
    compiled function and share one forward pass.

    Args:
        model: A Keras model in which no row affects another row's output.
        x: The inputs; see `input_gradients`.
        mode: `"forward"`, `"reverse"` or `"vectorized"`. The last takes all outputs at once, by `tf.vectorized_map`
            under XLA, with the memory of one chunk per output. `"auto"`: forward if a row has fewer input than output
            entries and the model supports forward mode, otherwise reverse.
        output: What to differentiate; see `input_gradients`. Here it may be of any shape `(rows, ...)`.
        batch_size: Rows per chunk, on all replicas together. A chunk's Jacobians have `batch_size` x outputs x inputs
            entries. If `None`, chosen by the memory that a row takes; see `input_gradients`.
        wrt: The inputs to differentiate with respect to; see `input_gradients`.
        jit_compile: Whether to compile with XLA; `"auto"` follows the model. `mode="vectorized"` always uses XLA.
        out: Files to write the results to; see `input_gradients`.
        stream: Whether to return an iterator over the results of the chunks.
        verbose: 1 for a progress bar, 2 for one line at the end, 0 for neither.

    Returns:
        An array of shape `(rows, *output_shape, *input_shape)` for each input, nested as the inputs or as `wrt`. See
        `input_gradients`.

    Raises:
        ValueError: As for `input_gradients`; or forward mode is requested and some gradient in the model is not
            differentiable, or XLA can't compile the vectorized model.

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
                "mode='vectorized' needs XLA: without it, TensorFlow's batched matrix products write out of bounds. "
                "Remove jit_compile, or write mode='reverse'."
            )
        jit_compile = True
    options = DerivativeOptions(output, wrt, batch_size, jit_compile, out, stream, verbose)
    methods = [Jacobian("auto"), Jacobian("reverse")] if mode == "auto" else [Jacobian(mode)]
    try:
        return differentiate(model, x, methods, options)
    except tf.errors.InvalidArgumentError as error:
        if mode != "vectorized":
            raise
        raise ValueError(
            "XLA can't compile this model with mode='vectorized', as with recurrent layers. Write mode='reverse'."
        ) from error
