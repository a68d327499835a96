"""Loss normalization: the divisor of a micro-batch's loss, and so the weight of its gradient."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_paragrad.compat.model import (
    all_layers,
    overrides_compute_loss,
    overrides_train_step,
    summed_by_keras,
)
from keras_paragrad.compat.types import Batch, LossArguments
from keras_paragrad.engine.losses.divisors import SUM, DivisorKey, Normalizer, UnknownDivisorError, gradient_divisor_of
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes.independence import independence_refusal
from keras_paragrad.engine.replicas.replica_batch import rows_of

# The advice if all parts of a batch have the same size and weights, by the component that splits batches.
_FOR_EQUAL_PARTS = {
    "AccumulatingOptimizer": "write AccumulatingOptimizer(..., weighting='uniform')",
    "DistributedFit": "write DistributedFit(..., exact=False)",
    "Pipeline": "write Pipeline(..., microbatches=1)",
    "microbatch": "write AccumulatingOptimizer(..., weighting='uniform'), and give fit() the micro-batches",
    "make_private": "let the loss be a sum or a mean of one value per example",
}
# Whose `weighting` to state, if not the component's own.
_CONFIGURED_BY = {"Pipeline": "DistributedFit"}
# The advice for models that mix examples.
_TO_TRAIN_ANYWAY = {**_FOR_EQUAL_PARTS, "microbatch": "write microbatch(..., weighting='examples')"}


# The components that divide a custom `train_step`.
_CAPTURES_STEPS = ("microbatch", "DistributedFit", "AccumulatingOptimizer")


class IndivisibleError(ValueError):
    """The gradients of parts of a batch can't be combined into that of the whole, as their weights are unknown."""


@dataclasses.dataclass(frozen=True)
class LossNormalization:
    """Computes the normalizer of a loss, for the `weighting` of `AccumulatingOptimizer`.

    Instances with the same weighting are equal, so they share compiled steps.

    Attributes:
        weighting: `"auto"`, `"examples"`, `"sample_weight"`, `"mask"` or `"sum"`.
        asked_by: The component that splits batches, for errors to name.
    """

    weighting: str = "auto"
    asked_by: str = dataclasses.field(default="AccumulatingOptimizer", compare=False)

    def check(self, model: keras.Model) -> None:
        """Refuses a model whose loss has an unknown normalizer.

        Raises:
            ValueError: The model has a custom `train_step`, or with `"auto"` a custom `compute_loss`.
        """
        name = type(model).__name__
        if overrides_train_step(model):
            if self.captures_steps:
                return
            raise IndivisibleError(
                f"{name} defines its own train_step, so the normalizer of its loss is unknown, and parts of a batch "
                "with different sizes or weights would bias the gradient. If all parts have the same size and "
                f"weights, {_FOR_EQUAL_PARTS[self.asked_by]}; otherwise move what train_step does into compute_loss."
            )
        if not self.takes_whole_losses:
            self._check_compute_loss(model)

    @property
    def takes_whole_losses(self) -> bool:
        """Whether a loss that compares examples can be computed on the outputs of the whole batch."""
        return self.asked_by in ("microbatch", "DistributedFit")

    def _check_compute_loss(self, model: keras.Model) -> None:
        if self.weighting == "auto" and overrides_compute_loss(model):
            raise IndivisibleError(
                f"{type(model).__name__} defines its own compute_loss, so the normalizer of its loss is unknown. "
                f"{self._advice}"
            )

    def __call__(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer:
        """The normalizer of the loss that was just computed; see `keras_paragrad.engine.step.gradient.Normalize`."""
        weight = self._weight(model, arguments, terms)
        self._refuse_mixing(model, arguments, terms, training=True)
        return weight

    def _weight(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer:
        self._check_compute_loss(model)
        stated = self._stated(model, arguments, terms)
        return _normalizer_of_terms(model, terms, self._advice) if stated is None else stated

    def _refuse_mixing(
        self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm], *, training: bool
    ) -> None:
        """Raises if parts of a batch do not give the loss and the states of the whole."""
        normalize = STATED.get(self.weighting)
        refusal = independence_refusal(
            model, arguments, terms, asked_by=self.asked_by, training=training, normalize=normalize
        )
        if refusal:
            anyway = f" To train anyway, {_TO_TRAIN_ANYWAY[self.asked_by]}." if self._takes_weighting else ""
            raise IndivisibleError(f"{refusal}{anyway}")

    def in_evaluation(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer | None:
        """The weight of a part of a batch in evaluation, or `None` if each output's loss has its own."""
        self._check_compute_loss(model)
        self._refuse_mixing(model, arguments, terms, training=False)
        return self._stated(model, arguments, terms)

    def in_custom_step(self, model: keras.Model, data: Batch, terms: Sequence[LossTerm], what: str) -> Normalizer:
        """The weight of a part of a batch in a custom `test_step`, for a scalar that errors call `what`.

        Raises:
            ValueError: The normalizer is unknown.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if terms or self.weighting in ("examples", "sample_weight", "sum"):
            y_pred = terms[0].y_pred if terms else None
            arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
            self._refuse_mixing(model, arguments, list(terms), training=False)
            return self._weight(model, arguments, list(terms))
        raise ValueError(
            f"{type(model).__name__} defines its own test_step, so the normalizer of {what} is unknown, and parts of a "
            "batch with different sizes would bias it. Compute the loss with self.compute_loss(...), and update "
            "metrics with every example, as in metric.update_state(y, y_pred). If it is a mean over the examples, "
            f"write {self._configured_by}(..., weighting='examples')."
        )

    def _stated(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer | None:
        """The weight as the user states it or as added losses determine it; `None` to derive it from the losses."""
        by_example = any(term.by_example for term in terms)
        if by_example and self.weighting in ("sample_weight", "mask"):
            raise ValueError(
                f"weighting={self.weighting!r}, but with PerExampleGradients(..., masked_mean='example') the gradient "
                f"is divided by the number of examples. Write {self._configured_by}(..., weighting='examples'), or "
                "leave it out."
            )
        if by_example and self.weighting == "examples":
            # Derived from the losses, it is the same, and the logged losses keep their own divisors.
            return None
        if self.weighting in STATED and self.weighting != "sum":
            return STATED[self.weighting](arguments)._replace(stated=self.weighting)
        if self.weighting == "sum" or self._adds_sums(model, terms):
            return _normalizer_of_sum(model, terms)._replace(stated="sum")
        return None

    def _adds_sums(self, model: keras.Model, terms: list[LossTerm]) -> bool:
        """Whether layers add losses of several values, which Keras sums, as it sums the compiled ones.

        Raises:
            ValueError: Layers add other losses.
        """
        summed = summed_by_keras(model)
        if any(summed) and not all(term.is_sum for term in terms):
            raise IndivisibleError(
                "A layer passes one value per example to add_loss(). Keras sums these values, while the model's other "
                "losses are means, so no single weight combines parts of a batch into the whole. Write "
                "add_loss(keras.ops.mean(values)) with weighting='examples', or compile with losses of "
                "reduction='sum'."
            )
        if not all(summed):
            raise IndivisibleError(
                "A layer adds a loss with add_loss() or an activity regularizer, which may be a sum or a mean over the "
                f"examples. {self._advice}"
            )
        return bool(summed)

    @property
    def captures_steps(self) -> bool:
        """Whether a custom `train_step` is divided, by `keras_paragrad.engine.custom_step`."""
        return self.asked_by in _CAPTURES_STEPS

    @property
    def _configured_by(self) -> str:
        return _CONFIGURED_BY.get(self.asked_by, self.asked_by)

    @property
    def _takes_weighting(self) -> bool:
        # A stated weight that isn't the loss's would not bound the contribution of an example.
        return self.asked_by != "make_private"

    @property
    def _advice(self) -> str:
        """What to write where the weighting is unknown."""
        if not self._takes_weighting:
            return "For training with differential privacy, let each loss return one value per example."
        return (
            f"If you know the normalizer, state it: {self._configured_by}(..., weighting=...) takes 'examples', "
            f"'sample_weight', 'mask' or 'sum'. If all parts of a batch have the same size and weights, "
            f"{_FOR_EQUAL_PARTS[self.asked_by]}."
        )


def warn_of_batch_statistics(model: keras.Model) -> None:
    """Warns of layers that normalize with batch statistics, which differ between a batch and its parts."""
    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    names = [layer.name for layer in layers if layer.trainable]
    if names:
        warnings.warn(
            f"{', '.join(names)} normalize with the statistics of each micro-batch, so training differs from training "
            "on whole batches. Use GroupNormalization, or set trainable=False on these layers.",
            stacklevel=3,
        )


def _undivided(arguments: LossArguments) -> Normalizer:
    return Normalizer(tf.constant(1.0), summed=True)


def _examples(arguments: LossArguments) -> Normalizer:
    return Normalizer(tf.cast(rows_of(arguments["x"]), "float32"))


def _sample_weight(arguments: LossArguments) -> Normalizer:
    weights = keras.tree.flatten(arguments["sample_weight"])
    return Normalizer(_sum(weights[0])) if weights and weights[0] is not None else _examples(arguments)


def _mask(arguments: LossArguments) -> Normalizer:
    mask = LossTerm(keras.losses.MeanSquaredError(), None, arguments["y_pred"], None).prediction_mask
    return Normalizer(_sum(mask)) if mask is not None else _examples(arguments)


STATED: dict[str, Callable[[LossArguments], Normalizer]] = {
    "examples": _examples,
    "sample_weight": _sample_weight,
    "mask": _mask,
    "sum": _undivided,
}


def _normalizer_of_terms(model: keras.Model, terms: list[LossTerm], advice: str) -> Normalizer:
    """The normalizer that all compiled losses share."""
    if not terms:
        raise IndivisibleError("The model was compiled without a loss. Write model.compile(optimizer, loss=...).")
    divisors = [_divisor(term, advice) for term in terms]
    kinds = {kind for kind, _ in divisors}
    if len(kinds) > 1:
        raise IndivisibleError(
            f"The losses of this model's outputs have different normalizers ({_name_kinds(divisors)}), so no single "
            "weight combines micro-batches into the whole batch. Use one reduction, one set of sample weights and one "
            "mask for all outputs."
        )
    kind, value = divisors[0]
    return _normalizer_of_sum(model, terms) if kind == SUM else Normalizer(value)


def _normalizer_of_sum(model: keras.Model, terms: list[LossTerm]) -> Normalizer:
    """The normalizer of a loss that is a sum over the examples."""
    averaged = [term.loss.name for term in terms if not (term.is_sum or term.reduces_itself)]
    if averaged and not overrides_compute_loss(model):
        raise IndivisibleError(
            f"weighting='sum' states that the loss is a sum over the examples, but {', '.join(averaged)} averages. "
            "Give it reduction='sum', or state another weighting."
        )
    if any(variable.regularizer for variable in model.trainable_variables):
        raise IndivisibleError(
            "The loss is a sum over the examples, so a weight regularizer would count once per micro-batch. Write "
            "reduction='sum_over_batch_size' for the loss, or use the optimizer's weight_decay."
        )
    return Normalizer(tf.constant(1.0), summed=True)


def _divisor(term: LossTerm, advice: str) -> tuple[DivisorKey, tf.Tensor]:
    try:
        return gradient_divisor_of(term)
    except UnknownDivisorError as error:
        raise IndivisibleError(f"{error} {advice}") from None


def _name_kinds(divisors: list[tuple[DivisorKey, tf.Tensor]]) -> str:
    names = {"sum": "nothing", "weights": "sample weights", "mask": "a mask", "size": "the number of elements"}
    return ", ".join(names[kind[0]] for kind, _ in divisors)


def _sum(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(tensor, "float32"))
