"""Builds the layers that a model's own `train_step` calls, which need not be called with the batch."""

import contextlib
from collections.abc import Generator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.variables import Variable

from keras_paragrad.compat.model import all_layers, train_step_of
from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.probes.trial import SIZES, run_trial, synthetic_rows
from keras_paragrad.engine.step.interception import capturing_applies


def build_layers_by_step(model: keras.Model, data: Batch) -> None:
    """Builds a model's layers and metrics by running its `train_step` on two synthetic rows, without any update.

    Args:
        model: A model whose `train_step` is its own.
        data: Tensors, or `keras.KerasTensor`, with the shapes and dtypes of a batch.
    """
    # Compiled losses and metrics make theirs when they are first called.
    compiled = [each for each in (model._compile_loss, model._compile_metrics) if each is not None]
    if all(each.built for each in (*all_layers(model), *compiled)):
        return
    strategy = model.distribute_strategy
    specs = keras.tree.map_structure(_spec, data)

    def build(size: int) -> None:
        rows = synthetic_rows(specs, 2, seed=0, size=size)
        with strategy.scope(), capturing_applies(lambda *call: None), _without_assignments():
            train_step_of(model)(rows)

    run_trial(build, *SIZES, otherwise=None, question="which weights train_step makes")


def _spec(tensor: Any) -> Any:
    return None if tensor is None else tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


@contextlib.contextmanager
def _without_assignments() -> Generator[None]:
    """Context in which Keras's variables are made, and not assigned."""
    assign = Variable.assign
    Variable.assign = lambda variable, value: variable
    try:
        yield
    finally:
        Variable.assign = assign
