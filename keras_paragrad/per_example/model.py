"""`wrap`: a model of the same weights that knows the gradients of its examples."""

from typing import Any

import keras

from keras_paragrad.arguments import check_instance
from keras_paragrad.per_example.wrapper import PerExampleGradients


@keras.saving.register_keras_serializable(package="keras_paragrad")
class PerExampleModel(keras.Model):
    """What `wrap` returns: a model within a `PerExampleGradients` layer.

    Args:
        per_example: The layer.
        **kwargs: Keras's own for models.
    """

    def __init__(self, per_example: PerExampleGradients, **kwargs: Any):
        super().__init__(**kwargs)
        self.per_example = per_example

    def build(self, input_shape: Any = None) -> None:
        self.per_example.build(input_shape)
        self.built = True

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        masked = {} if mask is None else {"mask": mask}
        return self.per_example(inputs, training=training, **masked)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "per_example": keras.saving.serialize_keras_object(self.per_example)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "PerExampleModel":
        config = dict(config)
        layer = keras.saving.deserialize_keras_object(config.pop("per_example"), custom_objects)
        return cls(layer, **config)


def wrap(model: keras.Model, **options: Any) -> PerExampleModel:
    """A model that shares another's weights and leaves the gradients of single examples behind when it is trained.

    Args:
        model: A Sequential, Functional or subclassed model.
        **options: Those of `PerExampleGradients`.

    Returns:
        A model to compile and fit; its `PerExampleGradients` layer is `per_example`. What it learns, `model` knows.

    Raises:
        ValueError: See `PerExampleGradients`.

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
