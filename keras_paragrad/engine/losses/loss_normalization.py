"""Loss normalization: the divisor of a micro-batch's loss, and so the weight of its gradient."""

import dataclasses
import logging
import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.model import (
    added_losses,
    all_layers,
    overrides_compute_loss,
    overrides_train_step,
    summed_by_keras,
)
from keras_paragrad.compat.state import state_of
from keras_paragrad.compat.types import Batch, LossArguments
from keras_paragrad.engine.losses.divisors import (
    SIZE,
    SUM,
    DivisorKey,
    Normalizer,
    UnknownDivisorError,
    gradient_divisor_of,
)
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.losses.weightings import (
    WEIGHTINGS,
    DivisorFunction,
    Weighting,
    step_arguments,
    weighting_of,
)
from keras_paragrad.engine.probes.independence import mixing_reasons, once_per_compile
from keras_paragrad.engine.probes.weighting_trial import FIRST, ROWS, WeightingTrial, try_weightings

_log = logging.getLogger("keras_paragrad")
# The advice if all parts of a batch have the same size and weights, by the component that splits batches.
_FOR_EQUAL_PARTS = {
    "AccumulatingOptimizer": "write AccumulatingOptimizer(..., weighting='uniform')",
    "DistributedFit": "write DistributedFit(..., exact=False)",
    "Pipeline": "write Pipeline(..., microbatches=1)",
    "microbatch": "write AccumulatingOptimizer(..., weighting='uniform'), and give fit() the micro-batches",
    "make_private": "let the loss be a sum or a mean of one value per example",
}
_RECOMPUTE = "recompute() saves memory for any loss."
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
        weighting: `"auto"`, `"examples"`, `"sample_weight"`, `"mask"`, `"sum"`, or a function.
        asked_by: The component that splits batches, for errors to name.
    """

    weighting: str | DivisorFunction = "auto"
    asked_by: str = dataclasses.field(default="AccumulatingOptimizer", compare=False)

    def check(self, model: keras.Model) -> None:
        """Refuses a model that can't be divided, whatever its loss divides by.

        Raises:
            ValueError: The model has a custom `train_step`.
        """
        name = type(model).__name__
        if overrides_train_step(model) and not self.captures_steps:
            raise IndivisibleError(
                f"{name} defines its own train_step, so the normalizer of its loss is unknown, and parts of a batch "
                "with different sizes or weights would bias the gradient. If all parts have the same size and "
                f"weights, {_FOR_EQUAL_PARTS[self.asked_by]}; otherwise move what train_step does into compute_loss."
            )

    @property
    def takes_whole_losses(self) -> bool:
        """Whether a loss that compares examples can be computed on the outputs of the whole batch."""
        return self.asked_by in ("microbatch", "DistributedFit")

    def __call__(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer:
        """The normalizer of the loss that was just computed; see `keras_paragrad.engine.step.gradient.Normalize`."""
        mixes = self._refuse_mixing(model, arguments, terms, training=True)
        return self._normalizer(model, arguments, terms, tried=not mixes)

    def _normalizer(
        self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm], *, tried: bool = True
    ) -> Normalizer:
        """The normalizer as the user states it, as it follows from the losses, or as a trial finds it.

        Args:
            model: The model.
            arguments: The arguments of its `compute_loss`.
            terms: The terms of its compiled losses.
            tried: Whether what is stated is held to a trial.
        """
        stated = self._stated(model, arguments, terms)
        if stated is not None:
            if tried and self.weighting != "auto":
                self._check_stated(model, arguments)
            return stated
        reason = self.why_unknown(model, terms)
        if reason is None:
            return _normalizer_of_terms(model, terms)
        weighting = self._find(model, arguments, reason)
        self._check_by_example(terms, weighting.name)
        return weighting.normalizer(arguments)

    def _refuse_mixing(
        self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm], *, training: bool
    ) -> bool:
        """Raises if parts of a batch do not give the loss and the states of the whole; whether they may not.

        With a stated weighting, the reasons are only warned of.
        """
        stated = self.weighting != "auto"
        reasons = mixing_reasons(model, arguments, terms, asked_by=self.asked_by, training=training, refused=not stated)
        if reasons and not stated:
            anyway = f" To train anyway, {_TO_TRAIN_ANYWAY[self.asked_by]}." if self._takes_weighting else ""
            raise IndivisibleError(f"{reasons}{anyway}")
        return reasons is not None

    def in_evaluation(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer | None:
        """The weight of a part of a batch in evaluation, or `None` if each output's loss has its own."""
        self._refuse_mixing(model, arguments, terms, training=False)
        stated = self._stated(model, arguments, terms)
        reason = self.why_unknown(model, terms) if stated is None else None
        return stated if reason is None else self._find(model, arguments, reason).normalizer(arguments)

    def in_custom_step(self, model: keras.Model, data: Batch, terms: Sequence[LossTerm], what: str) -> Normalizer:
        """The weight of a part of a batch in a custom `test_step`, for a scalar that errors call `what`.

        Raises:
            ValueError: The normalizer is unknown.
        """
        if terms or self.weighting in ("examples", "sample_weight", "sum") or callable(self.weighting):
            arguments = {**step_arguments(data), "y_pred": terms[0].y_pred if terms else None}
            self._refuse_mixing(model, arguments, list(terms), training=False)
            return self._normalizer(model, arguments, list(terms), tried=bool(terms))
        raise ValueError(
            f"{type(model).__name__} defines its own test_step, so the normalizer of {what} is unknown, and parts of a "
            "batch with different sizes would bias it. Compute the loss with self.compute_loss(...), and update "
            "metrics with every example, as in metric.update_state(y, y_pred). If it is a mean over the examples, "
            f"write {self._configured_by}(..., weighting='examples')."
        )

    def _stated(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer | None:
        """The normalizer as the user states it or as added losses determine it; `None` if another rule has to."""
        stated = weighting_of(self.weighting)
        if stated is not None:
            self._check_by_example(terms, stated.name)
            if stated.name == "examples" and any(term.by_example for term in terms):
                # Derived from the losses, it is the same, and the logged losses keep their own divisors.
                return None
            if stated.divisor is None:
                return _normalizer_of_sum(model, terms)._replace(stated="sum")
            return stated.normalizer(arguments)
        if self.why_unknown(model, terms):
            return None
        summed = summed_by_keras(model)
        if any(summed) and not all(term.is_sum for term in terms):
            raise IndivisibleError(
                "A layer passes one value per example to add_loss(). Keras sums these values, while the model's other "
                "losses are means, so no single weight combines parts of a batch into the whole. Write "
                "add_loss(keras.ops.mean(values)) with weighting='examples', or compile with losses of "
                "reduction='sum'."
            )
        return _normalizer_of_sum(model, terms)._replace(stated="sum") if summed else None

    def _check_by_example(self, terms: list[LossTerm], name: str) -> None:
        """Refuses what contradicts the gradient of a mean of the examples' masked means."""
        if any(term.by_example for term in terms) and name in ("sample_weight", "mask"):
            raise ValueError(
                f"weighting={name!r}, but with PerExampleGradients(..., masked_mean='example') the gradient "
                f"is divided by the number of examples. Write {self._configured_by}(..., weighting='examples'), or "
                "leave it out."
            )

    def why_unknown(self, model: keras.Model, terms: list[LossTerm]) -> str | None:
        """Why what the loss divides by doesn't follow from the compiled losses, or `None` if it does."""
        if overrides_compute_loss(model):
            return f"{type(model).__name__} defines its own compute_loss, so the normalizer of its loss is unknown."
        if not all(summed_by_keras(model)):
            return (
                "A layer adds a loss with add_loss() or an activity regularizer, which may be a sum or a mean over the "
                "examples."
            )
        try:
            for term in terms:
                gradient_divisor_of(term)
        except UnknownDivisorError as error:
            return str(error)
        return None

    def _find(self, model: keras.Model, arguments: LossArguments, reason: str) -> Weighting:
        """What an unknown loss divides by, as a trial shows; raises with the `reason` that it is unknown."""
        if not self._takes_weighting:
            raise IndivisibleError(
                f"{reason} For training with differential privacy, let each loss return one value per example."
            )
        trial = find_weightings(model, arguments)
        problem = _problem_of(trial)
        if problem or trial is None:
            raise IndivisibleError(f"{reason} {problem} {self._advice(trial, added=bool(added_losses(model)))}")
        weighting = trial.fitting[0]
        message = (
            f"The loss of {model.name!r} was tried on made-up rows, and parts of a batch are weighted by "
            f"weighting={weighting.argument}."
        )
        state = state_of(model)
        if message not in state.logged:
            state.logged |= {message}
            _log.info("%s", message)
        return weighting

    def _check_stated(self, model: keras.Model, arguments: LossArguments) -> None:
        """Raises if a trial shows that the loss divides by something else than what is stated."""
        stated = weighting_of(self.weighting)
        assert stated is not None, "auto states nothing"
        trial = find_weightings(model, arguments, stated)
        fit = trial and trial.fit_of(stated)
        if trial is None or fit is None or not fit.error:
            # Without a mask, "mask" is the number of examples.
            return
        fitting = [each.argument for each in trial.fitting]
        advice = (
            f"Write weighting={fitting[0]}, or leave it out."
            if fitting
            else self._advice(trial, added=bool(added_losses(model)))
        )
        raise IndivisibleError(
            f"weighting={stated.argument} is not what the loss of {type(model).__name__} is divided by. "
            f"{_seen(trial)} {advice}"
        )

    def _advice(self, trial: WeightingTrial | None, *, added: bool) -> str:
        """What to write where the weighting is unknown; `added` says whether layers add losses."""
        name = self._configured_by
        functions = f"{name}(..., weighting=...) takes 'examples', 'sample_weight', 'mask', 'sum' or"
        if trial is None or trial.ambiguous or trial.random:
            return (
                f"If you know the normalizer, state it: {functions} a function of (x, y, y_pred, sample_weight) that "
                "returns it for a part of a batch."
            )
        whole = {
            "DistributedFit": "DistributedFit('none') trains any loss.",
            "AccumulatingOptimizer": "microbatch(model, size) also takes losses that compare examples.",
        }.get("microbatch" if added and self.asked_by != "DistributedFit" else self.asked_by, _RECOMPUTE)
        multiplies = ", or multiplies means over them, as the load balancing of experts does" if added else ""
        return (
            "It divides by something else, such as a count of tokens, or divides its terms by different things, or "
            f"compares examples{multiplies}. In the first case state what it divides by: {name}(..., weighting="
            f"lambda x, y, y_pred, sample_weight: keras.ops.sum(y != 0)), for instance. {whole}"
        )

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


def find_weightings(
    model: keras.Model, arguments: LossArguments, stated: Weighting | None = None
) -> WeightingTrial | None:
    """`try_weightings`, once for each `compile` and signature of the arguments."""
    given = {name: arguments[name] for name in ("x", "y", "sample_weight")}
    key = ("weightings", stated if stated and stated.name not in WEIGHTINGS else None)
    return once_per_compile(key, model, given, lambda: try_weightings(model, arguments, stated))


UNIFORM_NEEDS = (
    "weighting='uniform' counts all micro-batches alike, which needs micro-batches of one size, a loss that is a mean, "
    "and nothing that happens once an update."
)


def warn_of_uniform(model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> None:
    """Warns, once for each `compile`, of a loss that is no mean over the examples, though micro-batches count alike."""

    def find() -> str | None:
        normalize = LossNormalization()
        if normalize.why_unknown(model, terms) is None:
            kinds = {gradient_divisor_of(term)[0][0] for term in terms}
            return None if kinds <= {SIZE[0]} else ", ".join(sorted(_KINDS[kind] for kind in kinds))
        trial = find_weightings(model, arguments)
        if trial is None or WEIGHTINGS["examples"] in trial.fitting:
            return None
        return str(trial)

    given = {name: arguments[name] for name in ("x", "y", "sample_weight")}
    if found := once_per_compile(("uniform",), model, given, find):
        warnings.warn(
            f"{UNIFORM_NEEDS} The loss of {type(model).__name__} is not divided by the number of examples ({found}). "
            "Leave weighting out.",
            stacklevel=2,
        )


def scale_by_replicas(
    model: keras.Model, loss: tf.Tensor, arguments: LossArguments, terms: list[LossTerm]
) -> tuple[tf.Tensor, Normalizer | None]:
    """A replica's loss such that the sum over the replicas is that of the batch, if all have equally many examples.

    Means and what layers add are divided by the number of replicas, as Keras divides them, and sums are not. Of a
    model's own `compute_loss`, and of a loss that returns one number, a trial shows which it is. Also returns the
    normalizer of such a sum, for the logs.
    """
    share = 1 / replica_count()
    unknown = overrides_compute_loss(model) or any(term.reduces_itself or term.values.shape.rank == 0 for term in terms)
    if unknown:
        trial = find_weightings(model, arguments)
        is_sum = trial is not None and trial.fitting == [WEIGHTINGS["sum"]]
        if is_sum:
            return loss, WEIGHTINGS["sum"].normalizer(arguments)
        return loss * tf.cast(share, loss.dtype), None
    flat = model._compile_loss._flat_losses
    factors = [1.0 if each.loss_weights is None else each.loss_weights for each in flat]
    scaled = loss * tf.cast(share, loss.dtype)
    for place, term in enumerate(terms):
        if term.is_sum:
            scaled += tf.cast(term.result * factors[place % len(factors)] * (1 - share), loss.dtype)
    return scaled, None


def _problem_of(trial: WeightingTrial | None) -> str | None:
    """Why a trial doesn't show what a loss divides by."""
    if trial is None:
        return "It could not be tried on made-up rows; the log says why."
    if trial.random:
        return "It draws random numbers that are not the same for the rows of a part, so a trial shows nothing."
    if not trial.fitting:
        return _seen(trial)
    if trial.ambiguous:
        return "On made-up rows the mask of the output hides nothing, so whether it divides by it is unknown."
    return None


def _seen(trial: WeightingTrial) -> str:
    return (
        f"On {ROWS} made-up rows, and on {FIRST} and {ROWS - FIRST} of them, the weighted gradients of the parts don't "
        f"add up to that of the whole: {trial}."
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


def _normalizer_of_terms(model: keras.Model, terms: list[LossTerm]) -> Normalizer:
    """The normalizer that all compiled losses share."""
    if not terms:
        raise IndivisibleError("The model was compiled without a loss. Write model.compile(optimizer, loss=...).")
    divisors = [gradient_divisor_of(term) for term in terms]
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
    if overrides_compute_loss(model):
        return Normalizer(tf.constant(1.0), summed=True)
    averaged = [
        term.loss.name for term in terms if not (term.is_sum or term.reduces_itself or term.values.shape.rank == 0)
    ]
    if averaged:
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


_KINDS = {"sum": "nothing", "weights": "sample weights", "mask": "a mask", "size": "the number of elements"}


def _name_kinds(divisors: list[tuple[DivisorKey, tf.Tensor]]) -> str:
    return ", ".join(_KINDS[kind[0]] for kind, _ in divisors)
