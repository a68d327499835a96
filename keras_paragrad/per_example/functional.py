"""`per_example_gradients` and `per_example_norms`: for custom training loops and for inspecting data."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.per_example.batches import in_batches
from keras_paragrad.per_example.quantities import Quantities


def per_example_gradients(
    model: keras.Model,
    x: Any,
    y: Any,
    loss: Any,
    sample_weight: Any = None,
    batch_size: int | None = None,
    *,
    training: bool = False,
    jit_compile: bool = False,
) -> list[np.ndarray]:
    """The exact gradient of each example's own loss, in one forward and backward pass per `batch_size` rows.

    Args:
        model: A model. If it is not built yet, it is built from `x`, except within a `tf.function`.
        x: Inputs, arrays or tensors `(N, ...)`, nested as the model takes them.
        y: Targets, `(N, ...)`, nested as the outputs are.
        loss: A Keras loss, its name, or a function of targets and predictions that returns a value per example. For
            several outputs, a structure nested as these are, whose losses are summed. An example's own loss is the loss
            of a batch of that example alone.
        sample_weight: Multiplies each example's loss, `(N,)`.
        batch_size: Rows per pass; 256 by default.
        training: Whether to call the model in training mode, with dropout.
        jit_compile: Whether to compile with XLA.

    Returns:
        A list of float32 arrays `(N, *shape)`, one for each of the model's `trainable_variables`, in their order.
        Within a `tf.function`, tensors, computed for all rows at once.

    Raises:
        ValueError: The loss or a layer mixes examples, or the rows don't match.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import per_example_gradients
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> kernel, bias = per_example_gradients(model, np.ones((100, 8)), np.ones((100, 1)), "mse")
    >>> kernel.shape, bias.shape
    ((100, 8, 1), (100, 1))
    """
    return in_batches(_gradients, model, x, y, loss, sample_weight, batch_size, training, jit_compile)


def per_example_norms(
    model: keras.Model,
    x: Any,
    y: Any,
    loss: Any,
    sample_weight: Any = None,
    batch_size: int | None = None,
    *,
    training: bool = False,
    jit_compile: bool = False,
) -> np.ndarray:
    """The global norm of the gradient of each example's own loss, mostly without materializing the gradients.

    Args:
        model: See `per_example_gradients`, also for the other arguments.
        x: Inputs.
        y: Targets.
        loss: Loss.
        sample_weight: Multiplies each example's loss, `(N,)`.
        batch_size: Rows per pass; 256 by default.
        training: Whether to call the model in training mode.
        jit_compile: Whether to compile with XLA.

    Returns:
        A float32 array `(N,)`; within a `tf.function`, a tensor.

    Raises:
        ValueError: The loss or a layer mixes examples, or the rows don't match.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import per_example_norms
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> per_example_norms(model, np.ones((100, 8)), np.ones((100, 1)), "mse").shape
    (100,)
    """
    return in_batches(_norms, model, x, y, loss, sample_weight, batch_size, training, jit_compile)[0]


def _gradients(quantities: Quantities) -> list[tf.Tensor]:
    return [tf.cast(gradient, "float32") for gradient in quantities.gradients()]


def _norms(quantities: Quantities) -> list[tf.Tensor]:
    return [tf.sqrt(quantities.squared_norms())]
