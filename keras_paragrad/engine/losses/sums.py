"""The losses of a batch as sums over its parts: what `fit` and `evaluate` show of parts put together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.model import has_own_compute_loss
from keras_paragrad.engine.losses.divisors import SIZE, SUM, UnknownDivisorError, divisor_of
from keras_paragrad.engine.losses.terms import LossTerm


class LossForm(NamedTuple):
    """What is the same for all parts of a batch.

    Attributes:
        factors: The weight of each output's loss in the total besides the first entry.
        called: For each output, whether its loss was computed.
        by_rows: For each output, whether Keras's tracker of its loss counts rows instead of batches.
        proportional: Whether every loss is divided by a fixed multiple of the rows.
    """

    factors: tuple[float, ...]
    called: tuple[bool, ...]
    by_rows: tuple[bool, ...]
    proportional: bool


class LossSums(NamedTuple):
    """The losses of a part of a batch. The sum over several parts gives the losses of them all.

    Attributes:
        vector: Numerators, divisors and rows. The first numerator is of the total, without what outputs' losses make of
            it by their `factors`; the others are the outputs'. A divisor of 0 is that of a sum.
        form: What the numbers mean.
    """

    vector: tf.Tensor
    form: LossForm

    def only_if(self, some: tf.Tensor | None) -> "LossSums":
        """These, or zeros where there are no examples."""
        if some is None:
            return self
        return self._replace(vector=tf.where(some, self.vector, tf.zeros_like(self.vector)))

    def of_rows(self, rows: tf.Tensor) -> "LossSums":
        """These, where only so many rows count and the others weigh 0; losses are divided by rows, or by nothing."""
        entries = 1 + len(self.form.factors)
        first, others, divisors, total = tf.split(self.vector, [1, entries - 1, entries, 1])
        share = tf.math.divide_no_nan(tf.cast(rows, total.dtype), total)
        # What isn't of an output is that of weights, which is the same for any number of rows.
        return self._replace(vector=tf.concat([first * share, others, divisors * share, total * share], 0))


class Shown(NamedTuple):
    """Losses of parts put together.

    Attributes:
        values: The total and each output's loss.
        rows: How many examples they were computed on.
    """

    values: tf.Tensor
    rows: tf.Tensor


def zero_sums(model: keras.Model) -> tf.Tensor:
    """The sums of no part at all, of a model whose losses are built."""
    return tf.zeros([2 * (1 + outputs_of(model)) + 1], model._loss_tracker.dtype)


def outputs_of(model: keras.Model) -> int:
    """How many losses a model was compiled with, once they are built."""
    compiled = model._compile_loss
    return len(compiled._flat_losses or ()) if compiled is not None else 0


def shown(vector: tf.Tensor, form: LossForm) -> Shown:
    """The losses that follow from the sums over all parts of a batch."""
    entries = 1 + len(form.factors)
    numerators, divisors, rows = tf.split(vector, [entries, entries, 1])
    values = tf.where(divisors == 0, numerators, tf.math.divide_no_nan(numerators, divisors))
    total = values[0] + tf.reduce_sum(values[1:] * tf.constant(form.factors, values.dtype, (entries - 1,)))
    return Shown(tf.concat([[total], values[1:]], 0), rows[0])


def loss_sums(
    model: keras.Model,
    loss: tf.Tensor,
    terms: Sequence[LossTerm],
    rows: tf.Tensor,
    weight: Any = None,
    *,
    divided: bool = False,
) -> LossSums:
    """The sums of a part of a batch.

    Args:
        model: The model that computed its loss.
        loss: What its `compute_loss` returned.
        terms: The calls of its compiled losses.
        rows: How many examples the part has.
        weight: The weight of the part's gradient, a `Normalizer`, if measured.
        divided: Whether Keras divided losses by the number of replicas.
    """
    dtype = model._loss_tracker.dtype
    rows = tf.cast(rows, dtype)
    stated = weight if weight is not None and weight.stated is not None else None
    outputs = _Outputs(model, terms, rows if stated is None else tf.cast(stated.value, dtype), divided, dtype)
    value = _mean(loss, dtype)
    summed = stated is not None and stated.summed
    composed = outputs.known and (stated is None or summed) and not has_own_compute_loss(model)
    if composed:
        # What is left are weights' regularizers, which are the same for every part, and losses that layers add.
        value = value - tf.add_n(outputs.weighed) if model.losses and outputs.weighed else value
        value = value if model.losses else tf.constant(0, dtype)
    if divided:
        value *= replica_count()
    divisor = rows if stated is None else tf.cast(stated.value, dtype)
    form = LossForm(
        tuple(outputs.factors if composed else [0.0] * len(outputs.factors)),
        tuple(outputs.called),
        tuple(outputs.by_rows),
        outputs.proportional and (stated is None or stated.stated == "examples"),
    )
    first, divisor = (value, tf.zeros_like(divisor)) if summed else (value * divisor, divisor)
    return LossSums(tf.stack([first, *outputs.numerators, divisor, *outputs.divisors, rows]), form)


class _Outputs:
    """The numerators and divisors of a model's compiled losses, in the order of its outputs."""

    def __init__(self, model: keras.Model, terms: Sequence[LossTerm], unknown: tf.Tensor, divided: bool, dtype: str):
        count = outputs_of(model)
        flat = model._compile_loss._flat_losses if count else []
        zero = tf.constant(0, dtype)
        self.factors = [1.0 if each.loss_weights is None else float(each.loss_weights) for each in flat]
        self.called = [False] * count
        self.by_rows = [bool(model.run_eagerly)] * count
        self.numerators, self.divisors = [zero] * count, [zero] * count
        self.weighed: list[tf.Tensor] = []
        self.known = self.proportional = True
        for place, term in enumerate(terms):
            # A compute_loss of the user's own may call the compiled losses several times: the mean is shown.
            index = place % count
            value = _mean(term.result, dtype)
            self.weighed.append(value * self.factors[index])
            self.called[index] = True
            self.by_rows[index] |= term.result.shape.rank != 0
            scaled, divisor = self._divisor(term, unknown, dtype)
            if divided and scaled:
                value *= replica_count()
            self.numerators[index] += value if divisor is None else value * divisor
            self.divisors[index] += zero if divisor is None else divisor

    def _divisor(self, term: LossTerm, unknown: tf.Tensor, dtype: str) -> tuple[bool, Any]:
        """Whether Keras may have divided the result by the number of replicas, and what else it is divided by."""
        if term.result.shape.rank != 0:
            # Not reduced. Keras shows the mean of the elements.
            return False, tf.cast(tf.size(term.result), dtype)
        try:
            kind, divisor = divisor_of(term)
        except UnknownDivisorError:
            self.known = False
            return term.reduces_itself, unknown
        self.proportional &= kind == SIZE
        return kind != SUM, None if kind == SUM else tf.cast(divisor, dtype)


def _mean(loss: tf.Tensor, dtype: str) -> tf.Tensor:
    return tf.reduce_mean(tf.cast(loss, dtype))
