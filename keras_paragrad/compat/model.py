"""Queries about a model: its layers and metrics, what it overrides, and whether its `fit` is running."""

import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import keras

from keras_paragrad.compat.check import check_objects

# Models that have added losses of several values, and no others.
_ADDS_VALUES: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The model's layers at every depth."""
    return model._flatten_layers(include_self=False)


def check_no_row_states(model: keras.Model, parts: str, instead: str) -> None:
    """Refuses layers that keep a state for each row of a batch of one size, such as `LSTM(stateful=True)`.

    Args:
        model: The model.
        parts: What would be given parts of a batch.
        instead: What to write.

    Raises:
        ValueError: There is such a layer. The message names it.
    """
    found = next((layer for layer in all_layers(model) if getattr(layer, "stateful", False)), None)
    if found is not None:
        raise ValueError(
            f"{type(found).__name__}(stateful=True), {found.name!r}, keeps a state for each row of a batch, and "
            f"{parts} parts of it. Write stateful=False, or {instead}."
        )


def all_metrics(model: keras.Model) -> list[Any]:
    """The metrics that the model and its layers have as attributes; `metrics` may be overridden and leave some out."""
    return [metric for layer in model._flatten_layers() for metric in layer._metrics]


def all_variables(model: Any) -> list[keras.Variable]:
    """Each variable that calling a model or layer, or computing its loss and metrics, may assign to."""
    metrics = [*all_metrics(model), *getattr(model, "metrics", ())]
    variables = [*model.variables, *(variable for metric in metrics for variable in metric.variables)]
    return list({id(variable): variable for variable in variables}.values())


def added_losses(model: keras.Model) -> list[Any]:
    """What layers added as losses in this step, as they added it; weight regularizers are not among them."""
    return [loss for layer in model._flatten_layers() for loss in layer._get_own_losses()]


def added_losses_of(layers: Iterable[keras.layers.Layer]) -> list[Any]:
    """What layers, and those in them, have added as losses in this step."""
    return [loss for layer in layers for each in layer._flatten_layers() for loss in each._get_own_losses()]


def summed_by_keras(model: keras.Model) -> list[bool]:
    """For each added loss of this step whether it has several values, as one for each example, which Keras sums.

    One value of one example is told from a mean by what the model has added in other steps.
    """
    losses = added_losses(model)
    several = [loss.shape.num_elements() != 1 for loss in losses]
    if losses and all(several):
        _ADDS_VALUES.add(model)
    return several if model not in _ADDS_VALUES else [loss.shape.rank > 0 for loss in losses]


def overrides_compute_loss(model: keras.Model) -> bool:
    """Whether the model overrides how its loss is computed."""
    return type(model).compute_loss is not keras.Model.compute_loss or "compute_loss" in model.__dict__


def may_choose_xla(model: keras.Model) -> bool:
    """Whether a model was compiled with `jit_compile="auto"`, and XLA can compile its layers."""
    check_objects()
    asked = model._compile_config.config.get("jit_compile", "auto")
    return asked == "auto" and all(layer.supports_jit for layer in model._flatten_layers())


def overrides_fit(model: keras.Model) -> bool:
    """Whether the model's class does something with the data before Keras's `fit` gets them."""
    return type(model).fit is not keras.Model.fit


def overrides_predict(model: keras.Model) -> bool:
    """Whether the model's class does something with the data before Keras's `predict` gets them."""
    return type(model).predict is not keras.Model.predict


def overrides_train_step(model: keras.Model) -> bool:
    """Whether the model has a custom training step."""
    return type(model).train_step is not keras.Model.train_step or "train_step" in model.__dict__


def overrides_test_step(model: keras.Model) -> bool:
    """Whether the model has a custom evaluation step."""
    return type(model).test_step is not keras.Model.test_step or "test_step" in model.__dict__


def overrides_predict_step(model: keras.Model) -> bool:
    """Whether the model has a custom prediction step."""
    return type(model).predict_step is not keras.Model.predict_step or "predict_step" in model.__dict__


def compile_config(model: keras.Model) -> Any:
    """What stands for the latest `compile`: another object after each."""
    check_objects()
    return model._compile_config


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments of `compile`, by name."""
    check_objects()
    return dict(model._compile_config.config)


def fit_frame(frame: FrameType | None, model: Any = None) -> FrameType | None:
    """The innermost call of a model's `fit` from a frame outward, of the given model or of any."""
    while frame is not None:
        if frame.f_code.co_name == "fit":
            found = frame.f_locals.get("self")
            if found is model if model is not None else isinstance(found, keras.Model):
                return frame
        frame = frame.f_back
    return None
