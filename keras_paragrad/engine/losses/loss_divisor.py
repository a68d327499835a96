"""`LossDivisor`: what a part's loss is divided by, as stated or as Keras's losses say."""

import dataclasses

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.model import overrides_compute_loss, overrides_train_step, summed_by_keras
from keras_paragrad.compat.state import warn_once
from keras_paragrad.compat.types import LossArguments
from keras_paragrad.engine.losses.dividers import Divider, IndivisibleError
from keras_paragrad.engine.losses.divisors import (
    SIZE,
    SUM,
    Divisor,
    DivisorFunction,
    UnknownDivisorError,
    Weighting,
    divisor_of,
    weighting_of,
)
from keras_paragrad.engine.losses.terms import LossTerm, loss_weights_of


@dataclasses.dataclass(frozen=True)
class LossDivisor:
    """Maps a loss and its arguments to the loss's divisor.

    Instances with the same weighting are equal, so they share compiled steps.

    Attributes:
        weighting: `"auto"`, `"examples"`, `"sample_weight"`, `"mask"`, `"sum"`, or a function.
        divider: Describes the component that divides batches, for errors.
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
            return self.divider.of_train_step(model)
        return None

    @property
    def stated(self) -> Weighting | None:
        """The weighting that the user states, or `None` for `"auto"`."""
        return weighting_of(self.weighting)

    def __call__(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Divisor:
        """The divisor of a computed loss, as stated or as Keras's losses say."""
        if (stated := self._as_stated(model, arguments, terms)) is not None:
            return stated
        if reason := why_unknown(model, terms):
            raise IndivisibleError(f"{reason} {self.divider.to_state_it}")
        if not terms:
            raise IndivisibleError("The model was compiled without a loss. Write model.compile(optimizer, loss=...).")
        # All compiled losses have to be divided by the same thing.
        divisors = [divisor_of(term) for term in terms]
        if len({kind for kind, _ in divisors}) > 1:
            named = ", ".join(_KINDS[kind[0]] for kind, _ in divisors)
            raise IndivisibleError(
                f"The losses of this model's outputs have different divisors ({named}), so no single "
                "weight combines micro-batches into the whole batch. Use one reduction, one set of sample weights and "
                f"one mask for all outputs. {self.divider.for_any_loss}"
            )
        kind, value = divisors[0]
        return _divisor_of_sum(model, terms) if kind == SUM else Divisor(value)

    def in_evaluation(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Divisor | None:
        """The weight of a part in evaluation. `None` divides each output's loss by its own divisor."""
        stated = self._as_stated(model, arguments, terms)
        reason = why_unknown(model, terms) if stated is None else None
        if reason:
            raise IndivisibleError(reason)
        return stated

    def describe(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> str:
        """Describes what a part weighs, and how that is known: a sentence for `explain`."""
        if (stated := self.stated) is not None:
            return f"A part weighs what weighting={stated.argument} says, as stated."
        summed = bool(summed_by_keras(model)) or self(model, arguments, terms).summed
        kinds = dict.fromkeys(_KINDS[divisor_of(term)[0][0]] for term in terms)
        weighs = "Parts are added: the losses are sums" if summed else f"A part weighs {', '.join(kinds)}"
        return f"{weighs}, as the compiled losses and their reductions say."

    def _as_stated(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> Divisor | None:
        """The divisor that the user states, or that added losses determine; `None` if compiled losses determine it."""
        if (stated := self.stated) is not None:
            if stated.divisor is None:
                return _divisor_of_sum(model, terms)._replace(stated="sum")
            return stated.of_part(arguments)
        if why_unknown(model, terms):
            return None
        summed = summed_by_keras(model)
        if any(summed) and not all(term.is_sum for term in terms):
            raise IndivisibleError(
                "A layer passes one value per example to add_loss(). Keras sums these values, while the model's other "
                "losses are means, so no single weight combines parts of a batch into the whole. Write "
                "add_loss(keras.ops.mean(values)) with weighting='examples', or compile with losses of "
                "reduction='sum'."
            )
        return _divisor_of_sum(model, terms)._replace(stated="sum") if summed else None


def why_unknown(model: keras.Model, terms: list[LossTerm]) -> str | None:
    """Why the compiled losses don't determine the loss's divisor, or `None`."""
    if overrides_compute_loss(model):
        return f"{type(model).__name__} defines its own compute_loss, so the divisor of its loss is unknown."
    if not all(summed_by_keras(model)):
        return (
            "A layer adds a loss with add_loss() or an activity regularizer, which may be a sum or a mean over the "
            "examples."
        )
    try:
        for term in terms:
            divisor_of(term)
    except UnknownDivisorError as error:
        return str(error)
    return None


def warn_of_uniform(model: keras.Model, terms: list[LossTerm]) -> None:
    """Warns if micro-batches count equally, but Keras's losses aren't means over the examples."""
    kinds = set() if why_unknown(model, terms) else {divisor_of(term)[0][0] for term in terms}
    if not kinds <= {SIZE[0]}:
        found = ", ".join(sorted(_KINDS[kind] for kind in kinds))
        warn_once(
            model,
            "weighting='uniform' weights micro-batches equally. It requires micro-batches of one size, a loss that is "
            f"a mean, and nothing that happens once per update. The loss of {type(model).__name__} is not divided by "
            f"the number of examples ({found}). Leave weighting out.",
        )


def scale_by_replicas(model: keras.Model, loss: tf.Tensor, terms: list[LossTerm]) -> tf.Tensor:
    """Divides a replica's loss, but for terms that are sums, by the number of replicas.

    If the replicas' batches have equal sizes, their losses then sum to the batch's loss.
    """
    share = 1 / replica_count()
    scaled = loss * tf.cast(share, loss.dtype)
    if overrides_compute_loss(model) or any(term.reduces_itself or term.values.shape.rank == 0 for term in terms):
        warn_once(
            model,
            f"With exact=False the loss of {model.name!r} is divided by the number of replicas, as Keras does. "
            "If it is a sum, leave exact=False out.",
        )
        return scaled
    factors = loss_weights_of(model)
    for index, term in enumerate(terms):
        if term.is_sum:
            factor = tf.cast(factors[index % len(factors)], term.result.dtype)
            scaled += tf.cast(term.result * factor * (1 - share), loss.dtype)
    return scaled


def _divisor_of_sum(model: keras.Model, terms: list[LossTerm]) -> Divisor:
    """The divisor of a loss that is a sum over the examples."""
    if overrides_compute_loss(model):
        return Divisor(tf.constant(1.0), summed=True)
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
    return Divisor(tf.constant(1.0), summed=True)


_KINDS = {"sum": "nothing", "weights": "sample weights", "mask": "a mask", "size": "the number of elements"}
