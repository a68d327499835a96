"""Which layers, losses and metrics are Keras's own and compute each example apart, so that they need not be tried."""

import types
from typing import Any

import keras
from keras.src.ops.numpy import Add, Divide, Multiply, Subtract

from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.losses.terms import bound_arguments

_LAYERS = (
    *("activations.", "attention.", "convolutional.", "pooling.", "regularization.", "reshaping.", "rnn."),
    *(f"core.{name}" for name in ("dense", "einsum_dense", "embedding", "identity", "input_layer", "masking")),
    *(f"merging.{name}" for name in ("add", "average", "concatenate", "maximum", "minimum", "multiply", "subtract")),
    *(f"normalization.{name}" for name in ("batch", "group", "layer", "rms")),
    *(f"preprocessing.{name}" for name in ("normalization", "rescaling")),
)
_PLACES = ("keras.src.applications.", *(f"keras.src.layers.{name}" for name in _LAYERS))
_ELEMENTWISE = (Add, Divide, Multiply, Subtract)
_MODELS = ("keras.src.models.functional", "keras.src.models.sequential")
# Functions that compare examples, or reduce over them.
_OF_SEVERAL = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)


def computes_rows_apart(model: Any) -> bool:
    """Whether a model is Sequential or Functional, of Keras's own layers, which compute each example apart."""
    layers = [model, *all_layers(model)]
    operations = [operation for each in layers for operation in getattr(each, "operations", ())]
    nodes = [node for operation in operations for node in operation._inbound_nodes]
    # Along the last axis, one number for each example is mixed with the others'.
    return all(map(_is_apart, layers + operations)) and all(
        len(output.shape) > 1 for node in nodes for output in node.output_tensors
    )


def values_are_of_examples(loss_or_metric: Any) -> bool:
    """Whether a loss or metric is one of Keras's own that is made of values of each example."""
    function = getattr(loss_or_metric, "fn", None) or getattr(loss_or_metric, "_fn", None)
    axis = bound_arguments(loss_or_metric).get("axis", getattr(loss_or_metric, "axis", -1))
    return (
        _is_keras(type(loss_or_metric))
        and (function is None or (isinstance(function, types.FunctionType) and _is_keras(function)))
        and function not in _OF_SEVERAL
        and axis == -1
    )


def _is_apart(operation: Any) -> bool:
    module = type(operation).__module__
    if module in _MODELS:
        return True
    if type(operation) in _ELEMENTWISE:
        # Where a rank is lower, it is the last axes that are aligned.
        nodes = operation._inbound_nodes
        return all(
            len({len(each.shape) for each in (*node.input_tensors, *node.output_tensors)}) == 1 for node in nodes
        )
    if not module.startswith(_PLACES):
        return False
    axes = (getattr(operation, name, None) for name in ("axis", "_attention_axes"))
    equation = getattr(operation, "equation", None)
    return (
        all(axis is None or all(each == -1 or each > 0 for each in keras.tree.flatten(axis)) for axis in axes)
        and (equation is None or _keeps_rows(equation))
        and not getattr(operation, "stateful", False)
        and not any(map(_is_anothers, vars(operation).values()))
    )


def _keeps_rows(equation: str) -> bool:
    inputs, kernel, output = equation.replace("->", ",").split(",")
    return inputs[0] == output[0] and inputs[0] not in kernel.replace(".", "")


def _is_anothers(value: Any) -> bool:
    """Whether a value is a function, or can be called, and is not Keras's, as an activation of one's own."""
    can_be_called = callable(value) or hasattr(value, "call")
    return can_be_called and not _is_keras(value)


def _is_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.src.")
