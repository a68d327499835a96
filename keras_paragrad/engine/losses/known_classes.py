"""Knows which of Keras's classes compute each row by itself, and need no proof."""

import types

import keras

from keras_paragrad.compat.model import all_layers, overrides_compute_loss, overrides_train_step
from keras_paragrad.engine.losses.logs import has_metrics, overrides_compute_metrics
from keras_paragrad.engine.losses.terms import bound_arguments
from keras_paragrad.storage.gathering import is_gather

_LAYERS = (
    *("activations.", "attention.", "convolutional.", "pooling.", "regularization.", "reshaping.", "rnn."),
    *(f"core.{name}" for name in ("dense", "einsum_dense", "embedding", "identity", "input_layer", "masking")),
    *(f"merging.{name}" for name in ("add", "average", "concatenate", "maximum", "minimum", "multiply", "subtract")),
    *(f"normalization.{name}" for name in ("batch", "group", "layer", "rms")),
    *(f"preprocessing.{name}" for name in ("normalization", "rescaling")),
)
_ROW_WISE_MODULES = ("keras.src.applications.", *(f"keras.src.layers.{name}" for name in _LAYERS))
_ELEMENTWISE = {(keras.ops.add.__module__, name) for name in ("Add", "Divide", "Multiply", "Subtract")}
_MODELS = ("keras.src.models.functional", "keras.src.models.sequential")
# Losses that compare examples, or reduce over them.
_MIXING_LOSSES = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)


def computes_rows_independently(model: keras.layers.Layer) -> bool:
    """Whether a model is Sequential or Functional, of Keras's layers known to compute row by row."""
    layers = [model, *all_layers(model)]
    operations = [operation for layer in layers for operation in getattr(layer, "operations", ())]
    nodes = [node for operation in operations for node in operation._inbound_nodes]
    # In a vector of one number per example, the last axis is the axis of examples.
    return all(map(_is_row_wise, layers + operations)) and all(
        len(output.shape) > 1 for node in nodes for output in node.output_tensors
    )


def has_value_per_example(loss_or_metric: keras.losses.Loss | keras.metrics.Metric) -> bool:
    """Whether a loss or metric is Keras's own and computes a value for each example."""
    function = getattr(loss_or_metric, "fn", None) or getattr(loss_or_metric, "_fn", None)
    axis = bound_arguments(loss_or_metric).get("axis", getattr(loss_or_metric, "axis", -1))
    return (
        _is_keras(type(loss_or_metric))
        and (function is None or (isinstance(function, types.FunctionType) and _is_keras(function)))
        and function not in _MIXING_LOSSES
        and axis == -1
    )


def has_losses_per_example(model: keras.Model) -> bool:
    """Whether all compiled losses, which must be built, are Keras's own and compare no examples."""
    losses = model._compile_loss._flat_losses if model._compile_loss else ()
    return all(output_loss.loss is None or has_value_per_example(output_loss.loss) for output_loss in losses)


def is_keras_own(model: keras.Model) -> bool:
    """Whether layers, losses and step are Keras's, known to compute row by row. The losses must be built."""
    return (
        not (overrides_compute_loss(model) or overrides_train_step(model))
        and computes_rows_independently(model)
        and has_losses_per_example(model)
    )


def is_kerass_own_metric(metric: object) -> bool:
    """Whether a metric that was passed to `compile` is Keras's, with a value for each example."""
    if isinstance(metric, str):
        return keras.saving.get_registered_object(metric) is None
    return has_value_per_example(metric) if isinstance(metric, keras.metrics.Metric) else _is_keras(metric)


def metrics_are_known(model: keras.Model) -> bool:
    """Whether all compiled metrics are Keras's own, and so can be added over parts of a batch."""
    if not has_metrics(model):
        return True
    compiled = model._compile_config.config
    metrics = keras.tree.flatten([compiled.get(name) for name in ("metrics", "weighted_metrics")])
    if overrides_compute_metrics(model):
        return False
    return all(metric is None or is_kerass_own_metric(metric) for metric in metrics)


def _is_row_wise(operation: keras.Operation) -> bool:
    """Whether an operation is Keras's and computes each row from the same row of its inputs."""
    module = type(operation).__module__
    if module in _MODELS:
        return True
    if (module, type(operation).__name__) in _ELEMENTWISE:
        # Broadcasting aligns the last axes, so all ranks must be equal.
        nodes = operation._inbound_nodes
        return all(
            len({len(tensor.shape) for tensor in (*node.input_tensors, *node.output_tensors)}) == 1 for node in nodes
        )
    if not module.startswith(_ROW_WISE_MODULES):
        return False
    axes = (getattr(operation, name, None) for name in ("axis", "attention_axes"))
    equation = getattr(operation, "equation", None)
    return (
        all(axis is None or all(index == -1 or index > 0 for index in keras.tree.flatten(axis)) for axis in axes)
        and (equation is None or _keeps_rows(equation))
        and not getattr(operation, "stateful", False)
        and not any(map(_is_custom_callable, vars(operation).values()))
    )


def _keeps_rows(equation: str) -> bool:
    """Whether an einsum of inputs and a kernel computes each row of the inputs by itself."""
    inputs, kernel, output = equation.replace("->", ",").split(",")
    return inputs[0] == output[0] and inputs[0] not in kernel.replace(".", "")


def _is_custom_callable(value: object) -> bool:
    """Whether a value is a callable that isn't Keras's, such as a custom activation."""
    return (callable(value) or hasattr(value, "call")) and not (_is_keras(value) or is_gather(value))


def _is_keras(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.src.")
