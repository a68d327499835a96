"""`wrap`: a model with the same weights that computes per-example gradients when it trains."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_instance
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.delegation import (
    TRAINING_METHODS,
    delegate_methods,
    delegated,
    explain_missing_compile,
    overrides,
    preprocesses,
)
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.types import Config, Shape, Structure
from keras_paragrad.exports import passing_options_to
from keras_paragrad.per_example.calls import LossReads
from keras_paragrad.per_example.wrapper import PerExampleGradients

# A model may override these if they don't change the data, as KerasHub's tasks without a preprocessor.
_ON_DATA = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


@keras.saving.register_keras_serializable(package="keras_paragrad")
class PerExampleModel(keras.Model):
    """The model that `wrap` returns: a model inside a `PerExampleGradients` layer.

    If the inner model overrides `compute_loss`, `compute_metrics`, `test_step` or `predict_step`, these run on the
    inner model, with the loss and metrics that this model was compiled with.

    Args:
        per_example: The layer.
        **kwargs: Arguments of `keras.Model`.

    Raises:
        ValueError: The inner model overrides how it trains.
    """

    def __init__(self, per_example: PerExampleGradients, **kwargs: Any):
        check_internals("models", "wrapping")
        # The inner model casts its inputs, if needed. Its dtype policy decides on the loss scale.
        super().__init__(**{"dtype": per_example.layer.dtype_policy, "autocast": False, **kwargs})
        self.per_example = per_example
        inner = per_example.layer
        ignored = f" What {inner.name!r} was compiled with has no effect." * getattr(inner, "compiled", False)
        explain_missing_compile(
            self,
            f"{self.name!r}, the model that wrap returned, has not been compiled.{ignored} Write wrapped = "
            "wrap(...), then wrapped.compile(...) with the optimizer, loss and metrics, and wrapped.fit(...).",
        )
        if isinstance(inner, keras.Model):
            _check_methods(inner)
            delegate_methods(
                self, inner, lambda: LossReads(inner.trainable_variables, f"The compute_loss of {type(inner).__name__}")
            )

    def build(self, input_shape: Shape | None = None) -> None:
        self.per_example.build(input_shape)
        self.built = True

    def call(self, inputs: Structure, training: bool | None = None, mask: tf.Tensor | None = None) -> Structure:
        keywords = {} if mask is None else {"mask": mask}
        return self.per_example(inputs, training=training, **keywords)

    @property
    def output_names(self) -> list[str]:
        """The inner model's output names, used for the losses and metrics of several outputs."""
        return self.per_example.layer.output_names

    @property
    def metrics(self) -> list[keras.Metric]:
        inner = self.per_example.layer
        if not (isinstance(inner, keras.Model) and overrides(inner, "metrics")):
            return super().metrics
        with delegated(inner, self):
            return inner.metrics

    def get_config(self) -> Config:
        return {**super().get_config(), "per_example": keras.saving.serialize_keras_object(self.per_example)}

    @classmethod
    def from_config(cls, config: Config, custom_objects: dict[str, type] | None = None) -> "PerExampleModel":
        config = dict(config)
        layer = keras.saving.deserialize_keras_object(config.pop("per_example"), custom_objects)
        return cls(layer, **config)


@passing_options_to(PerExampleGradients, without=["layer"])
def wrap(model: keras.Model, **options: Any) -> PerExampleModel:
    """Wraps a model so that training also computes per-example gradients; the weights are shared.

    Compile the returned model: an earlier `compile` of `model` has no effect. If `model` overrides
    `compute_loss`, `compute_metrics`, `test_step` or `predict_step`, the overrides run; with `compute_loss`, pass
    `loss_reduction=` to say how it reduces over the examples.

    Args:
        model: A Sequential, Functional or subclassed model.
        **options: `quantity`, `clip_norm`, `transform`, `capacity` and `loss_reduction`; see `PerExampleGradients`.

    Returns:
        A model to compile and fit, whose attribute `per_example` is the `PerExampleGradients` layer. Training it trains
        `model`.

    Raises:
        ValueError: See `PerExampleGradients`; or the model overrides `train_step`, `fit` or another method that would
            not run. The message says what to do instead.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import wrap
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    >>> clipped = wrap(model, clip_norm=1.0)
    >>> clipped.compile("adam", loss="mse")
    >>> history = clipped.fit(np.ones((100, 8)), np.ones((100, 1)), batch_size=32, verbose=0)
    >>> clipped.per_example.norms.shape
    (4,)
    """
    check_instance("model", model, keras.Model, "a Keras model", example="keras.Sequential([keras.layers.Dense(10)])")
    wrapped = PerExampleModel(PerExampleGradients(model, **options), name=f"{model.name}_per_example")
    if model.built and getattr(model, "input_shape", None) is not None:
        wrapped.build(model.input_shape)
    return wrapped


def find_per_example_layer(model: keras.Model) -> PerExampleGradients | None:
    """The model's first `PerExampleGradients` layer, or `None`."""
    return next((layer for layer in all_layers(model) if isinstance(layer, PerExampleGradients)), None)


def _check_methods(model: keras.Model) -> None:
    """Refuses a model with training methods that would not run: its class's, or those that `microbatch` installs."""
    name = type(model).__name__
    for method in TRAINING_METHODS:
        if not overrides(model, method) or (method in _ON_DATA and not preprocesses(model)):
            continue
        if method == "train_step":
            advice = (
                "Move the computation of the loss into compute_loss, which does run; or keep train_step, and wrap the "
                "layer in the model whose gradients you want: "
                "PerExampleGradients(layer, loss_reduction='sum_over_batch_size')."
            )
        elif method in _ON_DATA:
            advice = (
                "For a KerasHub task, set preprocessor=None and pass fit what `task.preprocessor(x, y)` returns. For "
                "another model, do what this method does before fit, and train "
                "keras.Sequential([PerExampleGradients(model)]), which uses the model as a layer."
            )
        else:
            advice = (
                "If microbatch or DistributedFit installed it, apply them to the model that wrap returns instead. If "
                "it is yours, train keras.Sequential([PerExampleGradients(model)]), which uses the model as a layer."
            )
        raise ValueError(f"{name} has its own {method}, which a wrapped model would not run. {advice}")
