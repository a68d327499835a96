"""What the checks of steps share: models, an optimizer and a limit; TensorFloat-32 is off."""

import itertools

import keras
import numpy as np
import tensorflow as tf

from gpu_parts.case import Machine
from gpu_parts.models import MODELS, data_for, loss, made

LIMIT = 1e-5
STEPS, MICRO_BATCH = 3, 8
# Two windows of three micro-batches, the last of which has 3 rows.
ROWS = 2 * STEPS * MICRO_BATCH - 5
XLA = {"": {"jit": False}, ", XLA": {"jit": True}}
OF_ALL = {f"{name}{suffix}": {"name": name, **jit} for name, (suffix, jit) in itertools.product(MODELS, XLA.items())}
tf.config.experimental.enable_tensor_float_32_execution(False)


def optimizer_in_words(name: str) -> str:
    """What `optimizer` returns for a model."""
    return "SGD" if name == "Transformer" else "Adam, clipped"


def optimizer(name: str = "MLP") -> keras.optimizers.Optimizer:
    """Adam, clipped; for the Transformer SGD, as Keras squares and clips each lookup's gradient of a row by itself."""
    if optimizer_in_words(name) == "SGD":
        return keras.optimizers.SGD(0.1)
    # With its usual epsilon, gradients near zero would decide by their last digits.
    return keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=0.5)


def compiled(machine: Machine, model: keras.Model, by: keras.optimizers.Optimizer, jit: bool) -> keras.Model:
    """The model with a loss that is a weighted mean."""
    eager = machine.eager
    model.compile(by, loss("mean_with_sample_weight"), jit_compile=jit and not eager, run_eagerly=eager)
    return model


def fit(
    model: keras.Model, batch_size: int, *callbacks: keras.callbacks.Callback, rows: int = ROWS
) -> list[np.ndarray]:
    """The weights after two epochs."""
    x, y, weights = data_for(model, rows)
    model.fit(x, y, batch_size, 2, 0, list(callbacks), shuffle=False, sample_weight=weights)
    return model.get_weights()


def on_whole_batches(machine: Machine, name: str, jit: bool, batch_size: int) -> list[np.ndarray]:
    """The weights after two epochs of plain steps."""
    return fit(compiled(machine, made(name), optimizer(name), jit), batch_size)
