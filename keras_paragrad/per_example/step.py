"""One training step of a layer: captures per-example gradients, and scales them to each example's own loss."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.layers import outermost_layer
from keras_paragrad.compat.model import overrides_compute_loss, overrides_train_step, summed_by_keras
from keras_paragrad.compat.state import warn_once
from keras_paragrad.compat.types import GradientTensor, Structure
from keras_paragrad.engine.losses.divisors import SIZE, SUM, DivisorKey, divisor_of
from keras_paragrad.engine.losses.terms import MEANS, LossTerm, recorded_terms
from keras_paragrad.engine.step.gradient import replica_weight_of
from keras_paragrad.per_example.capture import Capture
from keras_paragrad.per_example.probing import units_for
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.units import (
    check_separable_layer,
    check_separable_loss,
    check_separable_model,
    example_losses,
)


class CapturedCall:
    """Calls a layer, and calls back once the backward pass through it is complete.

    The caller holds a reference until then. A backward pass that reaches a dropped step raises a `ValueError`.

    Args:
        layer: The layer.
        finish: Takes the step, and returns a gradient for each of the layer's weights, which the backward pass adds to
            the plain one; `None` adds nothing.
        skip_plain_gradients: Whether the plain gradients are left out, so that the gradients of `finish` replace them.
        loss: Records the loss.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        finish: Callable[["CapturedCall"], Sequence[GradientTensor | None]],
        skip_plain_gradients: bool,
        loss: "LossRecord",
    ):
        self.layer, self.finish, self.skip_plain_gradients, self.loss = layer, finish, skip_plain_gradients, loss

    def __call__(self, *arguments: Any, **keywords: Any) -> Structure:
        """Calls the layer, and records its units' calls in `capture`."""
        check_separable_layer(self.layer, *arguments, training=keywords.get("training") is not False)
        units = units_for(self.layer, arguments, keywords)
        self.capture = Capture(self.layer, units, self._anchor(), self.skip_plain_gradients)
        return self.capture(*arguments, **keywords)

    def _anchor(self) -> tf.Tensor:
        """A scalar whose gradient calls `finish`; any gradient of the weights triggers it, as they are inputs."""
        # TensorFlow never frees the gradient functions of graphs; a weak reference keeps them from holding the model.
        reference, name = weakref.ref(self), self.layer.name

        @tf.custom_gradient
        def anchor(zero: tf.Tensor, *weights: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
            def backward(_: tf.Tensor) -> Any:
                step = reference()
                if step is None:
                    raise ValueError(
                        f"{name!r} was called more than once in a step, and an example's gradient is the sum over all "
                        "calls. Wrap the model that calls it instead: keras_paragrad.wrap(model)."
                    )
                return tf.zeros_like(zero), *step.finish(step)

            return tf.identity(zero), backward

        weights = [tf.convert_to_tensor(variable.value) for variable in self.layer.trainable_variables]
        scalar: Any = anchor(tf.zeros([]), *weights)
        return scalar


class LossRecord:
    """Records how the trained model computes its loss, from the call of a layer in it to the backward pass.

    Args:
        reduction: How the loss reduces over the examples where that can't be observed: `"sum_over_batch_size"` or
            `"sum"`.

    Attributes:
        model: The compiled model whose call is running, or `None` in a custom training loop.
        terms: The calls of its compiled losses.
    """

    def __init__(self, reduction: str | None) -> None:
        self.reduction = reduction
        outermost: Any = outermost_layer()
        self.model = outermost if isinstance(outermost, keras.Model) and outermost.compiled else None
        self.terms: list[LossTerm] = []
        self._recording = contextlib.ExitStack()
        if self.model is not None:
            self.terms = self._recording.enter_context(recorded_terms(self.model))

    def close(self) -> None:
        """Stops recording."""
        self._recording.close()

    def factor(self, quantities: Quantities) -> tf.Tensor:
        """The factor from an example's share of the batch's gradient to the gradient of its own loss, a float32 scalar.

        Args:
            quantities: Those of the examples on this replica.

        Raises:
            ValueError: A loss is not a sum over the examples, or the outputs' losses have different divisors.
        """
        check_separable_model(self.model)
        for term in self.terms:
            check_separable_loss(term, quantities.variables)
        kind, divisor = self._divisor(tf.cast(quantities.batch, "float32"))
        weight = None if self.model is None else replica_weight_of(self.model)
        if weight is None:
            # Keras divides by the number of replicas, unless the loss is a sum.
            weight = 1.0 if kind == SUM else 1 / replica_count()
        optimizer, one = getattr(self.model, "optimizer", None), tf.constant(1.0)
        loss_scale = one if optimizer is None else tf.cast(optimizer.scale_loss(one), "float32")
        # The weight is zero on a replica without examples.
        return tf.math.divide_no_nan(divisor, weight * loss_scale)

    def warn_of_masks(self) -> None:
        """Warns where an example's norm depends on the masks of the others."""
        means = [term for term in self.terms if term.loss.reduction in MEANS or term.sample_weight is None]
        masked = [term.loss.name for term in means if not term.is_sum and term.mask is not None]
        if masked:
            warn_once(
                self.model,
                f"{', '.join(masked)} averages over all unmasked positions of the batch, so the norm by which an "
                "example is clipped or weighted depends on the masks of the others. Write reduction='sum' for the "
                "loss, or a loss that returns each example's own masked mean: then an example's gradient depends on "
                "its own mask only.",
            )

    def may_overflow(self, batch: tf.Tensor) -> tf.Tensor:
        """Whether a non-finite gradient of each example may be due to the loss scale alone, a boolean `(batch,)`.

        False without a loss scale, and where the example's loss itself is not finite.
        """
        if not isinstance(getattr(self.model, "optimizer", None), keras.optimizers.LossScaleOptimizer):
            return tf.zeros([batch], tf.bool)
        finite = [tf.math.is_finite(example_losses(term)) for term in self.terms]
        return tf.reduce_all(tf.stack([tf.ones([batch], tf.bool), *finite]), 0)

    def _divisor(self, rows: tf.Tensor) -> tuple[DivisorKey, tf.Tensor]:
        """The key of what the loss is divided by, and how often an example's share of it is in the example's own loss.

        A mean over all values of a batch is the mean of its examples' own means, and so is a masked one.
        """
        model, one = self.model, tf.constant(1.0)
        custom = model is not None and (overrides_compute_loss(model) or overrides_train_step(model))
        divisors: dict[DivisorKey, tf.Tensor] = {}
        # Of a custom loss, the reduction can't be observed.
        for term in () if custom else self.terms:
            key, divisor = divisor_of(term)
            if key != SUM and term.loss.reduction == "mean_with_sample_weight" and term.sample_weight is not None:
                divisors[key] = divisor * rows / tf.cast(tf.size(term.weights), "float32")
            else:
                divisors[SUM if key == SUM else SIZE] = one if key == SUM else rows
        if len(divisors) > 1:
            raise ValueError(
                "The losses of this model's outputs have different reductions "
                f"({', '.join(str(term.loss.reduction) for term in self.terms)}), so no single factor turns an "
                "example's share of the gradient into its own. Use reduction='sum_over_batch_size' for all of them."
            )
        if model is not None and not custom and any(summed_by_keras(model)):
            if divisors and SUM not in divisors:
                raise ValueError(
                    "A layer calls add_loss() with one value per example, which Keras sums, while the compiled loss is "
                    "a mean, so no single factor turns an example's share of the gradient into its own. Write "
                    "add_loss(keras.ops.mean(values)), or compile with a loss of reduction='sum'."
                )
            return SUM, one
        if divisors:
            return next(iter(divisors.items()))
        if self.reduction is None and custom:
            raise ValueError(
                f"{type(model).__name__} computes its own loss, and whether that is a mean or a sum over the examples "
                "is unknown. Write PerExampleGradients(..., loss_reduction='sum_over_batch_size'), or 'sum'."
            )
        return (SUM, one) if self.reduction == "sum" else (SIZE, rows)
