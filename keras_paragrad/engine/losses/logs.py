"""The losses and metrics that Keras's step logs, from parts of a batch and from several replicas."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica, replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.model import overrides_compute_loss
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import LossArguments, Scalar, StepLogs
from keras_paragrad.compat.variables import SavedVariables
from keras_paragrad.engine.losses.divisors import SIZE, SUM, Divisor, UnknownDivisorError, divisor_of
from keras_paragrad.engine.losses.terms import LossTerm, loss_weights_of


class LossForm(NamedTuple):
    """How to read the `LossSums` of a batch; the same for all its parts.

    Attributes:
        factors: The weight of each output's loss in the total: a number, or a variable of the user's, which is read
            where the total is computed.
        called: For each output, whether its loss was computed.
        by_rows: For each output, whether Keras's tracker of the loss counts rows instead of batches.
        proportional: Whether every loss is divided by a fixed multiple of the rows.
    """

    factors: tuple[Scalar, ...]
    called: tuple[bool, ...]
    by_rows: tuple[bool, ...]
    proportional: bool


class LossSums(NamedTuple):
    """The losses of a part of a batch, which can be summed over parts.

    Attributes:
        vector: [n_0, n_1, ..., d_0, d_1, ..., rows]: numerators, divisors, and the number of rows. The loss of output i
            is n_i / d_i, or n_i if d_i = 0. The rest of the total, such as regularizers, is n_0 / d_0.
        form: How to read the vector.
    """

    vector: tf.Tensor
    form: LossForm

    def zero_unless(self, nonempty: tf.Tensor | None) -> "LossSums":
        """The sums, or zeros if the replica batch is empty."""
        if nonempty is None:
            return self
        return self._replace(vector=tf.where(nonempty, self.vector, tf.zeros_like(self.vector)))

    def of_some_rows(self, rows: tf.Tensor) -> "LossSums":
        """The sums if only `rows` rows have a weight. Losses must be means over rows, or sums."""
        entries = 1 + len(self.form.factors)
        first, others, divisors, total = tf.split(self.vector, [1, entries - 1, entries, 1])
        share = tf.math.divide_no_nan(tf.cast(rows, total.dtype), total)
        # The first entry has the weight regularizers, which don't depend on the number of rows.
        return self._replace(vector=tf.concat([first * share, others, divisors * share, total * share], 0))


def outputs_of(model: keras.Model) -> int:
    """The number of compiled losses, once they are built."""
    compiled = model._compile_loss
    return len(compiled._flat_losses or ()) if compiled is not None else 0


def total_losses(vector: tf.Tensor, form: LossForm) -> tuple[tf.Tensor, tf.Tensor]:
    """The vector of total loss and outputs' losses, and the number of examples, from sums over all parts."""
    entries = 1 + len(form.factors)
    numerators, divisors, rows = tf.split(vector, [entries, entries, 1])
    values = tf.where(divisors == 0, numerators, tf.math.divide_no_nan(numerators, divisors))
    factors = tf.convert_to_tensor([tf.cast(factor, values.dtype) for factor in form.factors], values.dtype)
    total = values[0] + tf.reduce_sum(values[1:] * tf.reshape(factors, (entries - 1,)))
    return tf.concat([[total], values[1:]], 0), rows[0]


def loss_sums(
    model: keras.Model,
    loss: tf.Tensor,
    terms: Sequence[LossTerm],
    rows: tf.Tensor,
    weight: Divisor | None = None,
    *,
    divided: bool = False,
) -> LossSums:
    """The losses of a part as sums, from `compute_loss` and the compiled losses' terms.

    A stated `weight` weights the total loss, or else the number of rows does. `divided` says whether Keras has divided
    the losses by the number of replicas.
    """
    dtype = model._loss_tracker.dtype
    rows = tf.cast(rows, dtype)
    stated = weight if weight is not None and weight.stated is not None else None
    divisor = rows if stated is None else tf.cast(stated.value, dtype)
    outputs = _Outputs(model, terms, divisor, divided, dtype)
    value = _mean(loss, dtype)
    summed = stated is not None and stated.summed
    # Whether the total is the weighted sum of the outputs' losses, and a rest.
    composed = outputs.known and (stated is None or summed) and not overrides_compute_loss(model)
    if composed:
        # The rest is weight regularizers, which are the same for every part, and losses that layers add.
        if not model.losses:
            value = tf.constant(0, dtype)
        elif outputs.weighted:
            value -= tf.add_n(outputs.weighted)
    if divided:
        value *= replica_count()
    form = LossForm(
        tuple(outputs.factors if composed else [0.0] * len(outputs.factors)),
        tuple(outputs.called),
        tuple(outputs.by_rows),
        outputs.proportional and (stated is None or stated.stated == "examples"),
    )
    first, divisor = (value, tf.zeros_like(divisor)) if summed else (value * divisor, divisor)
    return LossSums(tf.stack([first, *outputs.numerators, divisor, *outputs.divisors, rows]), form)


class _Outputs:
    """The numerators and divisors of a model's compiled losses, in the order of the outputs.

    `unknown` is used in place of divisors that aren't known, and `known` says whether all are. `weighted` has the
    losses times their factors. For the other attributes, see `LossForm`.
    """

    def __init__(self, model: keras.Model, terms: Sequence[LossTerm], unknown: tf.Tensor, divided: bool, dtype: str):
        count = outputs_of(model)
        zero = tf.constant(0, dtype)
        self.factors = loss_weights_of(model) if count else []
        self.called = [False] * count
        self.by_rows = [bool(model.run_eagerly)] * count
        self.numerators, self.divisors = [zero] * count, [zero] * count
        self.weighted: list[tf.Tensor] = []
        self.known = self.proportional = True
        for call, term in enumerate(terms):
            # A custom `compute_loss` may call the compiled losses several times. The mean over the calls is logged.
            index = call % count
            value = _mean(term.result, dtype)
            self.weighted.append(value * tf.cast(self.factors[index], dtype))
            self.called[index] = True
            self.by_rows[index] |= term.result.shape.rank != 0
            scaled, divisor = self._divisor(term, unknown, dtype)
            if divided and scaled:
                value *= replica_count()
            self.numerators[index] += value if divisor is None else value * divisor
            self.divisors[index] += zero if divisor is None else divisor

    def _divisor(self, term: LossTerm, unknown: tf.Tensor, dtype: str) -> tuple[bool, tf.Tensor | None]:
        """Whether Keras divides the loss by the number of replicas. Also its divisor, or `None` for a sum."""
        if term.result.shape.rank != 0:
            # The loss isn't reduced. Keras logs the mean of its elements.
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


class LossWindow(SavedVariables):
    """The `LossSums` of the micro-batches since the last update, as a variable; made in the model's scope."""

    def __init__(self, model: keras.Model):
        super().__init__()
        entries = 1 + outputs_of(model)
        # The sums, and the trackers' totals and counts for the window so far.
        shape = (2 * entries + 1 + 2 * entries,)
        self.state = self.add("losses", shape, model._loss_tracker.dtype, aggregation="sum", local=True)


class TrackedLosses:
    """Adds the losses of a batch to Keras's loss trackers, within a step, on each replica.

    `part` is this replica's vector, to be summed over the replicas. Keras weights a batch's `loss` by its rows. The
    tracker of an output's loss weights all batches the same, unless the model runs eagerly or the loss is not reduced.
    If gradients are accumulated, `window` holds the losses of the micro-batches so far, and `ends` says whether this
    micro-batch is the last. If all replicas have the `same` sums, of the whole batch, only the first replica's count.
    """

    def __init__(
        self,
        model: keras.Model,
        sums: LossSums,
        window: LossWindow | None = None,
        *,
        ends: bool = False,
        same: bool = False,
    ):
        self.model: keras.Model = model
        self.form: LossForm = sums.form
        self.window, self.ends, self.same = window, ends, same
        if same and replica_index() > 0:
            sums = sums.zero_unless(tf.constant(False))
        # Sums, then the trackers' totals and counts for the window: see `LossWindow`.
        entries = 1 + len(sums.form.factors)
        self.part = tf.concat([sums.vector, tf.zeros([2 * entries], sums.vector.dtype)], 0)
        if window is not None:
            # A count of 0 means that metrics were reset, which discards the window too.
            in_use = self.model._loss_tracker.count.value > 0
            self.part += tf.where(in_use, window.state.value, 0.0)

    def track(self) -> None:
        """Adds the losses to the trackers."""
        if self.form.proportional and len(self._trackers) == 1:
            # Keras sums the tracker over the replicas.
            self._add(self.part, 1)
        else:
            self.add(sum_over_replicas([self.part])[0])

    def add(self, total: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Adds the sum of all replicas' `part` to the trackers. Returns the variables with their increments."""
        return self._add(total, replica_count())

    @property
    def _trackers(self) -> list[keras.metrics.Mean]:
        return [self.model._loss_tracker, *(self.model._compile_loss.metrics if self.model._compile_loss else ())]

    def _add(self, total: tf.Tensor, replicas: int) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Adds the sum over `replicas` replicas, of which each adds its share to its trackers.

        Leaves out what earlier micro-batches of the window have added.
        """
        entries = 1 + len(self.form.factors)
        sums, added_totals, added_counts = tf.split(total, [2 * entries + 1, entries, entries])
        values, rows = total_losses(sums, self.form)
        batches = tf.cast(rows > 0, rows.dtype)
        counts = tf.stack([rows, *(rows if by_rows else batches for by_rows in self.form.by_rows)])
        if self.window is not None:
            state = self._of_replica(tf.concat([sums, values * counts, counts], 0), replicas)
            self.window.state.assign(tf.zeros_like(state) if self.ends else state)
        totals, counts = values * counts - added_totals, counts - added_counts
        added = []
        called = [True, *self.form.called]
        for index, tracker in enumerate(self._trackers):
            if called[index]:
                added += [(tracker.total, totals[index]), (tracker.count, counts[index])]
        for variable, value in added:
            variable.assign_add(self._of_replica(value, replicas))
        return added

    def _of_replica(self, total: tf.Tensor, replicas: int) -> tf.Tensor:
        """This replica's share of a sum over `replicas` replicas."""
        if not self.same:
            return total / replicas
        return total if replica_index() == 0 else tf.zeros_like(total)


# The names of the logs that a custom `compute_metrics` has returned in the last trace.
_SHOWN = Slot[tuple[str, ...] | None]("shown_metrics", None)


def has_metrics(model: keras.Model) -> bool:
    """Whether the logs of a compiled model have more than its losses."""
    return model._compile_metrics is not None or overrides_compute_metrics(model)


def overrides_compute_metrics(model: keras.Model) -> bool:
    """Whether a model has a `compute_metrics` of its own."""
    return type(model).compute_metrics is not keras.Model.compute_metrics or "compute_metrics" in vars(model)


def update_metrics(model: keras.Model, batch: LossArguments) -> None:
    """Updates a model's metrics with a part of a batch; `metrics_result` reads them after the last part.

    Refuses a custom `compute_metrics` that returns names that `get_metrics_result` doesn't.
    """
    # Elsewhere, Keras divides losses that are metrics, or that metrics call, by the number of replicas.
    with as_one_replica():
        computed = model.compute_metrics(**batch)
    if not overrides_compute_metrics(model):
        return
    logged = model.get_metrics_result()
    if not set(computed) <= set(logged):
        raise ValueError(
            f"compute_metrics of {type(model).__name__} returns {sorted(computed)}, and get_metrics_result "
            f"{sorted(logged)}. Batches are computed in parts, so their logs come from "
            "get_metrics_result. Override that too, so that it returns the same logs, computed from the states of "
            "metrics."
        )
    _SHOWN.attach(model, tuple(computed))


def metrics_result(model: keras.Model) -> StepLogs:
    """The result of `get_metrics_result`, without logs that a custom `compute_metrics` leaves out."""
    results, shown = model.get_metrics_result(), _SHOWN.of(model)
    return results if shown is None else {name: results[name] for name in shown}


class AllReducedResults:
    """The model's metrics, and `losses` if given, over the examples of all replicas.

    Keras averages the replicas' results, which is right only if all replicas have the same number of examples. Here
    states are summed. `parts` are the tensors to sum over replicas: a vector of states for each dtype, and the losses.
    """

    def __init__(self, model: keras.Model, losses: TrackedLosses | None = None):
        self.model = model
        self.losses = losses
        self.variables = [variable for variable in model.metrics_variables if variable.aggregation == "sum"]
        dtypes = dict.fromkeys(variable.dtype for variable in self.variables)
        self._groups = [[variable for variable in self.variables if variable.dtype == dtype] for dtype in dtypes]
        self.parts = [tf.concat([tf.reshape(variable.value, [-1]) for variable in group], 0) for group in self._groups]
        if losses is not None:
            self.parts.append(losses.part)

    def results(self, sums: Sequence[tf.Tensor]) -> StepLogs:
        """The result of `metrics_result` for the all-reduced `parts`."""
        state = {}
        # If there are `losses`, the last sum is theirs.
        for group, total in zip(self._groups, sums, strict=False):
            pieces = tf.split(total, [variable.shape.num_elements() for variable in group])
            state |= {
                id(variable): tf.reshape(piece, variable.shape) for variable, piece in zip(group, pieces, strict=True)
            }
        for variable, added in self.losses.add(sums[-1]) if self.losses else ():
            state[id(variable)] += added
        with keras.StatelessScope(state_mapping=[(variable, state[id(variable)]) for variable in self.variables]):
            return metrics_result(self.model)
