"""Finds, by a trial on made-up rows, layers whose training stores something of the examples in a state."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import call_model
from keras_paragrad.compat.model import added_losses
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.losses.known_classes import computes_rows_independently
from keras_paragrad.engine.proof.model_proof import state_owners
from keras_paragrad.engine.proof.pure_function import PureFunction
from keras_paragrad.engine.trials.made_up_rows import SIZES, synthetic_rows
from keras_paragrad.engine.trials.trial import STATE, TINY, run_trial
from keras_paragrad.per_example.mixing_layers import change_rows

_ROWS = 8
# The ranges of rows. The second, larger one also moves minima and maxima.
_RANGES = ((0.1, 0.9), (-1e3, 1e3))


def layers_storing_examples(model: keras.layers.Layer, *arguments: Any) -> list[str]:
    """Finds layers whose training changes a non-trainable state depending on the examples.

    Ignores batch normalization, and states that don't depend on data, such as seeds and counters.
    """

    def find(size: int):
        owners = state_owners(model)
        if not owners or computes_rows_independently(model):
            return []
        compute = PureFunction(model, lambda inputs: _train(model, inputs))
        # The second draw also has other tokens.
        first, second = (
            synthetic_rows(arguments, _ROWS, seed=seed, size=size, low=low, high=high)
            for seed, (low, high) in enumerate(_RANGES)
        )
        (_, one), (_, other) = map(compute, change_rows(first, second, list(range(_ROWS))))
        names = [
            owners[id(variable)]
            for variable, *values in zip(compute.variables, one, other, strict=True)
            if id(variable) in owners and not np.allclose(*values, rtol=STATE, atol=TINY, equal_nan=True)
        ]
        return list(dict.fromkeys(names))

    return run_trial(find, *SIZES, otherwise=[], question="whether states of layers depend on the examples")


def _train(model: keras.layers.Layer, inputs: tuple[Structure, ...]) -> list[tf.Tensor]:
    """The outputs and added losses of a call in training, for its changes of state."""
    outputs = call_model(model, *inputs, training=True)
    return [tensor for tensor in (*keras.tree.flatten(outputs), *added_losses(model)) if tf.is_tensor(tensor)]
