"""Delegates the overridden methods of one model to another model that trains it."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import override_attributes
from keras_paragrad.compat.private import in_symbolic_scope
from keras_paragrad.compat.state import MethodPatch, Slot, patched, warn
from keras_paragrad.compat.types import Structure

# Overrides that a training model can delegate to.
DELEGATED_METHODS = (
    "compute_loss",
    "compute_metrics",
    "get_metrics_result",
    "reset_metrics",
    "test_step",
    "predict_step",
)
# Overrides that conflict with the training model's.
TRAINING_METHODS = (
    "train_step",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
# Attributes that `compile` sets.
_COMPILED = (
    "_compile_config",
    "_compile_loss",
    "_compile_metrics",
    "_jit_compile",
    "_loss_tracker",
    "compiled",
    "loss",
    "optimizer",
)
# Whether a replaced `make_train_function` only warns.
_WARNS = Slot[bool]("only_warns", False)


def overrides(model: keras.Model, name: str) -> bool:
    """Whether a model overrides a method or property of `keras.Model`, in its class or on the instance."""
    on_instance = name in vars(model) and not _WARNS.of(vars(model)[name])
    return getattr(type(model), name) is not getattr(keras.Model, name) or on_instance


def preprocesses(model: keras.Model) -> bool:
    """Whether a model's own `fit` may change the data; KerasHub's tasks without a preprocessor don't."""
    if not hasattr(model, "preprocess_samples"):
        return True
    if getattr(model, "preprocessor", None) is not None:
        return True
    data = object(), object(), object()
    try:
        return tuple(model.preprocess_samples(*data)) != data
    except Exception:  # it read the data
        return True


def warn_on_fit(model: keras.Model, message: str) -> None:
    """Makes a model warn when its own `fit` makes the train function for the first time."""
    instance = vars(model)
    if "make_train_function" in instance:
        return

    def make_train_function(force: bool = False) -> None:
        del instance["make_train_function"]
        warn(message)
        model.make_train_function(force=force)

    _WARNS.attach(make_train_function, True)
    instance["make_train_function"] = make_train_function


def explain_missing_compile(model: keras.Model, message: str) -> None:
    """Replaces the message of the error that Keras raises for a model that is not compiled."""

    def assert_compile_called(method_name: str | None = None) -> None:
        if not model.compiled:
            raise ValueError(message)
        type(model)._assert_compile_called(model, method_name)

    vars(model)["_assert_compile_called"] = assert_compile_called


def layer_metrics(layer: keras.layers.Layer) -> list[keras.Metric]:
    """A layer's metrics, without the metrics passed to `compile`."""
    if not isinstance(layer, keras.Model):
        return layer.metrics
    with override_attributes(layer, compiled=False):
        return layer.metrics


def uncompile(layer: keras.layers.Layer) -> None:
    """Resets `compile` of a model."""
    if isinstance(layer, keras.Model) and layer.compiled:
        unset = dict.fromkeys(("_compile_loss", "_compile_metrics", "_loss_tracker", "loss", "optimizer"))
        vars(layer).update(unset, compiled=False)


class _Delegation(MethodPatch):
    def __init__(self, model: keras.Model, trained: keras.Model):
        super().__init__()
        self.model, self.trained = model, trained

    def patch_all(self) -> None:
        for name in _COMPILED:
            if name in vars(self.trained):
                self.replace(self.model, name, vars(self.trained)[name])


@contextlib.contextmanager
def delegated(model: keras.Model, trained: keras.Model) -> Generator[None]:
    """Context in which `model` has the loss, metrics and optimizer of `trained`, a compiled model."""
    with patched(model, lambda: _Delegation(model, trained)):
        yield


def delegate_methods(
    trained: keras.Model, model: keras.Model, while_loss: Callable[[], contextlib.AbstractContextManager[object]]
) -> None:
    """Makes `trained`, the compiled model, call the `DELEGATED_METHODS` that `model` overrides.

    `while_loss` makes a context for `compute_loss` in training.
    """
    for name in DELEGATED_METHODS:
        if overrides(model, name):
            # Bypass Keras's tracking of attributes.
            vars(trained)[name] = _delegated_method(trained, model, name)
    if overrides(model, "compute_loss"):
        vars(trained)["compute_loss"] = _delegated_loss(trained, model, while_loss)


def _delegated_method(trained: keras.Model, model: keras.Model, name: str) -> Callable[..., Any]:
    def method(*arguments: Any, **keywords: Any) -> Any:
        with delegated(model, trained):
            return getattr(model, name)(*arguments, **keywords)

    return method


def _delegated_loss(
    trained: keras.Model, model: keras.Model, while_loss: Callable[[], contextlib.AbstractContextManager[object]]
) -> Callable[..., tf.Tensor]:
    def compute_loss(
        x: Structure = None,
        y: Structure = None,
        y_pred: Structure = None,
        sample_weight: Structure = None,
        training: bool = True,
    ) -> tf.Tensor:
        # The call added losses to the trained model, and regularizers may read weights.
        added = override_attributes(model, _losses_override=trained.losses)
        context = while_loss() if training and not in_symbolic_scope() else contextlib.nullcontext()
        with delegated(model, trained), added, context:
            return model._compute_loss(x, y, y_pred, sample_weight, training)

    return compute_loss
