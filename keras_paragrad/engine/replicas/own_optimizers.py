"""Optimizers of a custom `train_step`, whose state is made in the first step."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import are_local, replica_count
from keras_paragrad.compat.method_patch import MethodPatch, patched


def built_outside_of_steps(model: Any) -> contextlib.AbstractContextManager[Any]:
    """While a step is traced in it, an optimizer of the model makes its variables outside of the graph.

    In a graph they would be made in a branch, which TensorFlow can't do on several devices.
    """
    if replica_count() == 1 or not are_local() or tf.executing_eagerly():
        return contextlib.nullcontext()
    return patched(model, lambda: _BuiltOutside(model))


class _BuiltOutside(MethodPatch):
    def __init__(self, model: Any):
        super().__init__()
        values = keras.tree.flatten([value for name, value in vars(model).items() if not name.startswith("_")])
        self.optimizers = [each for each in values if isinstance(each, keras.optimizers.Optimizer) and not each.built]

    def patch_all(self) -> None:
        for optimizer in self.optimizers:
            self.replace(optimizer, "build", _outside(optimizer.build))


def _outside(build: Callable[..., None]) -> Callable[..., None]:
    def built(variables: Any) -> None:
        with tf.init_scope():
            build(variables)

    return built
