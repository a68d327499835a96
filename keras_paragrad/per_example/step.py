"""One call of the layer in training, from the forward to the backward pass."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.capture import Capture
from keras_paragrad.per_example.mixing import check_layer
from keras_paragrad.per_example.probing import units_for
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.scaling import Divisor


class Step:
    """Calls a layer, and calls back once the backward pass through it is complete.

    The caller holds a reference until then. A backward pass that reaches a dropped step raises a `ValueError`.

    Args:
        layer: The layer.
        finish: Takes the step, and returns the gradients that the backward pass uses for the layer's weights; `None`
            keeps the plain gradient.
        detached: Whether `finish` replaces the gradients.
        divisor: Records the loss.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        finish: Callable[["Step"], Sequence[Any]],
        detached: bool,
        divisor: Divisor,
    ):
        self.layer, self.finish, self.detached, self.divisor = layer, finish, detached, divisor

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the layer."""
        check_layer(self.layer, *arguments, training=keywords.get("training") is not False)
        units = units_for(self.layer, arguments, keywords)
        self.capture = Capture(self.layer, units, self._anchor(), self.detached)
        return self.capture(*arguments, **keywords)

    def quantities(self) -> tuple[Quantities, tf.Tensor]:
        """The per-example quantities, and the factor from an example's share to the gradient of its own loss."""
        found = Quantities(self.capture.recorded, self.layer.trainable_variables)
        return found, self.divisor.factor(found.batch)

    def _anchor(self) -> Any:
        """A scalar whose gradient calls `finish`; any gradient of the weights triggers it, as they are inputs."""
        # TensorFlow never frees the gradient functions of graphs; a weak reference keeps them from holding the model.
        reference, name = weakref.ref(self), self.layer.name

        @tf.custom_gradient
        def anchor(zero, *weights):
            def backward(_):
                step = reference()
                if step is None:
                    raise ValueError(
                        f"{name!r} was called more than once in a step, and an example's gradient is the sum over all "
                        "calls. Wrap the model that calls it instead: keras_paragrad.wrap(model)."
                    )
                return tf.zeros_like(zero), *step.finish(step)

            return tf.identity(zero), backward

        weights = [tf.convert_to_tensor(variable.value) for variable in self.layer.trainable_variables]
        return anchor(tf.zeros([]), *weights)
