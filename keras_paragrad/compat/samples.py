"""A small compiled and built model and what goes with it, on which attributes of instances are looked for."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

_NAME = "keras_paragrad_sample"
_THREAD = threading.local()


def samples() -> list[Any]:
    """One instance of each class in `OF_OBJECTS`.

    Made in a thread and a graph of their own: Keras's counters of names, seeds and dtype policy are those of a thread,
    a strategy's scope stays outside, and in a graph nothing is run, so that devices can still be configured.
    """
    with ThreadPoolExecutor(max_workers=1) as own_thread:
        return own_thread.submit(_make).result()


def samples_being_made() -> bool:
    """Whether this thread is making samples."""
    return getattr(_THREAD, "making", False)


def _make() -> list[Any]:
    _THREAD.making = True
    with tf.Graph().as_default():
        # Initializers that draw take a seed from Python's generator.
        layer = keras.layers.Dense(1, kernel_initializer="zeros", name=f"{_NAME}_layer")
        model: Any = keras.Sequential([keras.Input((1,), name=f"{_NAME}_input"), layer], name=_NAME)
        optimizer = keras.optimizers.SGD(name=f"{_NAME}_optimizer")
        # With "auto", Keras would look for devices.
        model.compile(optimizer, loss="mse", jit_compile=False)
        optimizer.build(model.trainable_variables)
        output = keras.KerasTensor((1, 1), name=f"{_NAME}_output")
        compile_loss = CompileLoss("mse")
        compile_loss.build(output, output)
        rows = np.zeros((1, 1), "float32")
        return [
            layer,
            layer.kernel,
            model,
            optimizer,
            compile_loss,
            keras.losses.MeanSquaredError(name=f"{_NAME}_loss"),
            keras.metrics.MeanSquaredError(name=f"{_NAME}_metric"),
            ArrayDataAdapter(rows, rows, batch_size=1),
            GeneratorDataAdapter(iter([(rows, rows)])),
            tf.function(lambda value: value),
        ]
