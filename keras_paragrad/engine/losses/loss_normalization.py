"""Loss normalization: the divisor of a micro-batch's loss, and so the weight of its gradient.

The *normalizer* of a loss is its divisor. All this holds for any part of a batch: a micro-batch, a slice or a replica's
share.
"""

import dataclasses

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.model import overrides_compute_loss, overrides_train_step, summed_by_keras
from keras_paragrad.compat.state import log_once, warn_once
from keras_paragrad.compat.types import LossArguments
from keras_paragrad.engine.division.dividers import Divider
from keras_paragrad.engine.losses.divisors import SIZE, SUM, Normalizer, UnknownDivisorError, gradient_divisor_of
from keras_paragrad.engine.losses.refusals import IndivisibleError, Refusals, problem_of, seen
from keras_paragrad.engine.losses.terms import LossTerm, loss_weights_of
from keras_paragrad.engine.losses.weightings import WEIGHTINGS, DivisorFunction, Weighting, weighting_of
from keras_paragrad.engine.probes.independence import mixing_reasons, once_per_compile
from keras_paragrad.engine.probes.weighting_trial import WeightingTrial, try_weightings


@dataclasses.dataclass(frozen=True)
class LossNormalization:
    """Computes the normalizer of a loss, for the `weighting` of `AccumulatingOptimizer`.

    Instances with the same weighting are equal, so they share compiled steps.

    Attributes:
        weighting: `"auto"`, `"examples"`, `"sample_weight"`, `"mask"`, `"sum"`, or a function.
        divider: The divider of batches.
    """

    weighting: str | DivisorFunction
    divider: Divider = dataclasses.field(compare=False)

    def check(self, model: keras.Model) -> None:
        """Refuses a model that can't be divided, whatever its loss divides by."""
        if refusal := self.find_refusal(model):
            raise IndivisibleError(refusal)

    def find_refusal(self, model: keras.Model) -> str | None:
        """Why a model can't be divided, whatever its loss divides by, or `None`."""
        if overrides_train_step(model) and not self.divider.divides_steps:
            return self.refusals.of_train_step(model)
        return None

    @property
    def refusals(self) -> Refusals:
        """The errors, in the words of the divider."""
        return Refusals(self.divider)

    def __call__(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer:
        """The normalizer of the loss that was just computed; see `keras_paragrad.engine.step.gradient.Normalize`."""
        # Of a loss that mixes rows, as warned, a trial would refuse any weighting.
        mixes = self._check_rows(model, arguments, terms, training=True)
        return self.normalizer(model, arguments, terms, tried=not mixes)

    def normalizer(
        self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm], *, tried: bool
    ) -> Normalizer:
        """The normalizer as stated, or as the losses or a trial show it; if `tried`, a trial checks a stated one."""
        stated = self._stated(model, arguments, terms)
        if stated is not None:
            if tried and self.weighting != "auto":
                self.check_stated(model, arguments)
            return stated
        reason = _why_unknown(model, terms)
        if reason is None:
            return _normalizer_of_terms(model, terms)
        weighting = self._find(model, arguments, reason)
        self.refusals.check_by_example(terms, weighting.name)
        return weighting.normalizer(arguments)

    def check_read(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> None:
        """Raises if Keras's losses don't say what a part weighs, and nothing is stated."""
        if self.weighting == "auto" and (reason := _why_unknown(model, terms)):
            raise IndivisibleError(f"{reason} {self.refusals.to_state_it}")
        self(model, arguments, terms)

    def in_evaluation(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer | None:
        """The weight of a part of a batch in evaluation, or `None` if each output's loss has its own."""
        self._check_rows(model, arguments, terms, training=False)
        stated = self._stated(model, arguments, terms)
        reason = _why_unknown(model, terms) if stated is None else None
        if reason:
            raise IndivisibleError(reason)
        return stated

    def _check_rows(
        self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm], *, training: bool
    ) -> bool:
        """Raises if parts of a batch don't give the whole's loss and states.

        With a stated weighting, only warns, and returns whether they don't.
        """
        refused = self.weighting == "auto"
        reasons = mixing_reasons(model, arguments, terms, self.divider, training=training, refused=refused)
        if reasons and refused:
            raise IndivisibleError(f"{reasons} {self.refusals.anyway}".rstrip())
        return reasons is not None

    def describe(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> str:
        """Describes the weight of a part of a batch, and its evidence; a sentence for `explain`."""
        if (stated := weighting_of(self.weighting)) is not None:
            return f"A part weighs what weighting={stated.argument} says, as stated."
        reason = _why_unknown(model, terms)
        if reason is None:
            summed = bool(summed_by_keras(model)) or _normalizer_of_terms(model, terms).summed
            kinds = dict.fromkeys(_KINDS[gradient_divisor_of(term)[0][0]] for term in terms)
            weighs = "Parts are added: the losses are sums" if summed else f"A part weighs {', '.join(kinds)}"
            return f"{weighs}, as the compiled losses and their reductions say."
        argument = self._find(model, arguments, reason).argument
        return f"A part weighs what weighting={argument} says, by a trial on made-up rows. {reason}"

    def _stated(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Normalizer | None:
        """The normalizer that the user states or added losses determine; `None` if another rule applies."""
        stated = weighting_of(self.weighting)
        if stated is not None:
            self.refusals.check_by_example(terms, stated.name)
            if stated.name == "examples" and any(term.by_example for term in terms):
                # The losses give the same normalizer, and the logged losses keep their own divisors.
                return None
            if stated.divisor is None:
                return _normalizer_of_sum(model, terms)._replace(stated="sum")
            return stated.normalizer(arguments)
        if _why_unknown(model, terms):
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

    def _find(self, model: keras.Model, arguments: LossArguments, reason: str) -> Weighting:
        """Finds the divisor of an unknown loss by a trial, or raises with the `reason` that it is unknown."""
        if not self.divider.takes_weighting:
            raise IndivisibleError(f"{reason} {self.divider.for_any_loss}")
        trial = find_weightings(model, arguments)
        problem = problem_of(trial)
        if problem or trial is None:
            raise IndivisibleError(f"{reason} {problem} {self.refusals.advice(model, trial)}")
        weighting = trial.fitting[0]
        log_once(
            model,
            f"The loss of {model.name!r} was tried on made-up rows, and parts of a batch are weighted by "
            f"weighting={weighting.argument}.",
        )
        return weighting

    def check_stated(self, model: keras.Model, arguments: LossArguments) -> None:
        """Raises if a trial shows that the loss has another divisor than the stated one."""
        stated = weighting_of(self.weighting)
        assert stated is not None, "auto states nothing"
        trial = find_weightings(model, arguments, stated)
        fit = next((tried for tried in trial.fits if tried.weighting.name == stated.name), None) if trial else None
        if trial is None or fit is None or not fit.error:
            # Fits, or wasn't tried: "mask" isn't without a mask, where it is the number of examples.
            return
        fitting = [weighting.argument for weighting in trial.fitting]
        advice = f"Write weighting={fitting[0]}, or leave it out." if fitting else self.refusals.advice(model, trial)
        raise IndivisibleError(
            f"weighting={stated.argument} is not what the loss of {type(model).__name__} is divided by. "
            f"{seen(trial)} {advice}"
        )


def _why_unknown(model: keras.Model, terms: list[LossTerm]) -> str | None:
    """Why the compiled losses don't determine the loss's divisor, or `None`."""
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


def find_weightings(
    model: keras.Model, arguments: LossArguments, stated: Weighting | None = None
) -> WeightingTrial | None:
    """`try_weightings`, once for each `compile` and signature of the arguments."""
    given = {name: arguments[name] for name in ("x", "y", "sample_weight")}
    key = ("weightings", stated if stated and stated.name not in WEIGHTINGS else None)
    return once_per_compile(key, model, given, lambda: try_weightings(model, arguments, stated), by_replicas=False)


UNIFORM_NEEDS = (
    "weighting='uniform' weights micro-batches equally. It requires micro-batches of one size, a loss that is a mean, "
    "and nothing that happens once per update."
)


def warn_of_uniform(model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> None:
    """Warns, once for each `compile`, if micro-batches count equally but the loss isn't a mean over the examples."""

    def find() -> str | None:
        if _why_unknown(model, terms) is None:
            kinds = {gradient_divisor_of(term)[0][0] for term in terms}
            return None if kinds <= {SIZE[0]} else ", ".join(sorted(_KINDS[kind] for kind in kinds))
        trial = find_weightings(model, arguments)
        if trial is None or WEIGHTINGS["examples"] in trial.fitting:
            return None
        return str(trial)

    given = {name: arguments[name] for name in ("x", "y", "sample_weight")}
    if found := once_per_compile(("uniform",), model, given, find):
        warn_once(
            model,
            f"{UNIFORM_NEEDS} The loss of {type(model).__name__} is not divided by the number of examples ({found}). "
            "Leave weighting out.",
        )


def scale_by_replicas(
    model: keras.Model, loss: tf.Tensor, arguments: LossArguments, terms: list[LossTerm]
) -> tuple[tf.Tensor, Normalizer | None]:
    """Scales a replica's loss so that, for equal replica batches, the replicas' losses sum to the batch's loss.

    Divides means and added losses by the number of replicas, as Keras does, but not sums. For a custom
    `compute_loss`, or a loss that returns one number, a trial shows which it is. Also returns, for the logs, the
    normalizer of a sum that a trial has shown, or `None`.
    """
    share = 1 / replica_count()
    unknown = overrides_compute_loss(model) or any(term.reduces_itself or term.values.shape.rank == 0 for term in terms)
    if unknown:
        trial = find_weightings(model, arguments)
        if trial is not None and trial.fitting == [WEIGHTINGS["sum"]]:
            return loss, WEIGHTINGS["sum"].normalizer(arguments)
        return loss * tf.cast(share, loss.dtype), None
    factors = loss_weights_of(model)
    scaled = loss * tf.cast(share, loss.dtype)
    for place, term in enumerate(terms):
        if term.is_sum:
            factor = tf.cast(factors[place % len(factors)], term.result.dtype)
            scaled += tf.cast(term.result * factor * (1 - share), loss.dtype)
    return scaled, None


def _normalizer_of_terms(model: keras.Model, terms: list[LossTerm]) -> Normalizer:
    """The normalizer that all compiled losses share."""
    if not terms:
        raise IndivisibleError("The model was compiled without a loss. Write model.compile(optimizer, loss=...).")
    divisors = [gradient_divisor_of(term) for term in terms]
    kinds = {kind for kind, _ in divisors}
    if len(kinds) > 1:
        named = ", ".join(_KINDS[kind[0]] for kind, _ in divisors)
        raise IndivisibleError(
            f"The losses of this model's outputs have different normalizers ({named}), so no single "
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
