"""The logs of a step over several replicas, of Keras's steps and of custom ones."""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica, replica_index, sum_over_replicas
from keras_paragrad.compat.model import step_metrics
from keras_paragrad.compat.state import MethodPatch, patched, state_of
from keras_paragrad.compat.types import Batch, LossArguments, Scalar, StepLogs, Structure
from keras_paragrad.engine.losses.counted_scalars import (
    BY_ROWS,
    MEANS,
    NUMBERS,
    PRODUCTS,
    WEIGHTS,
    Cursor,
    MadeUpBy,
    NumberParts,
    is_sum_of_parts,
    scalars_of_test_step,
)
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import (
    added_scalar_refusal,
    counted_scalar_refusal,
    weighted_scalar_refusal,
)
from keras_paragrad.engine.losses.sums import TrackedLosses
from keras_paragrad.engine.losses.terms import LossTerm, recorded_terms
from keras_paragrad.engine.probes.trial import is_trial
from keras_paragrad.engine.replicas.replica_batch import ReplicaBatch


def has_metrics(model: keras.Model) -> bool:
    """Whether the logs of a compiled model have more than its losses."""
    return model._compile_metrics is not None or _overrides_compute_metrics(model)


def _overrides_compute_metrics(model: keras.Model) -> bool:
    return type(model).compute_metrics is not keras.Model.compute_metrics or "compute_metrics" in vars(model)


def update_metrics(model: keras.Model, batch: LossArguments) -> None:
    """Updates a model's metrics with a part of a batch, for `metrics_result` after the last part.

    Raises:
        ValueError: A custom `compute_metrics` returns names that `get_metrics_result` doesn't.
    """
    computed = model.compute_metrics(**batch)
    if not _overrides_compute_metrics(model):
        return
    logged = model.get_metrics_result()
    if not set(computed) <= set(logged):
        raise ValueError(
            f"compute_metrics of {type(model).__name__} returns {sorted(computed)}, and get_metrics_result "
            f"{sorted(logged)}. Batches are computed in parts, and the logs of all parts are those of "
            "get_metrics_result. Override that too, so that it returns the same logs, computed from the states of "
            "metrics."
        )
    state_of(model).shown_metrics = tuple(computed)


def metrics_result(model: keras.Model) -> StepLogs:
    """The result of `get_metrics_result`, without what a custom `compute_metrics` has left out for the last part."""
    results, shown = model.get_metrics_result(), state_of(model).shown_metrics
    return results if shown is None else {name: results[name] for name in shown}


class AllReducedResults:
    """The model's metrics over the examples of all replicas.

    All-reduces the metrics' states. Keras averages the replicas' results, which is right only if all had equally many
    examples.

    Args:
        model: The model, after its metrics were updated with the batch.
        losses: The batch's losses, or `None` if they are tracked already.

    Attributes:
        parts: The tensors to all-reduce: a vector for each dtype, and the losses.
    """

    def __init__(self, model: keras.Model, losses: TrackedLosses | None = None):
        self.model = model
        self.losses = losses
        self.variables = [variable for variable in model.metrics_variables if variable.aggregation == "sum"]
        dtypes = dict.fromkeys(variable.dtype for variable in self.variables)
        self._groups = [[variable for variable in self.variables if variable.dtype == dtype] for dtype in dtypes]
        self.parts = [tf.concat([tf.reshape(each.value, [-1]) for each in group], 0) for group in self._groups]
        if losses is not None:
            self.parts.append(losses.part)

    def results(self, sums: Sequence[tf.Tensor]) -> StepLogs:
        """The result of `metrics_result` for the all-reduced `parts`."""
        state = {}
        for group, total in zip(self._groups, sums, strict=False):
            pieces = tf.split(total, [variable.shape.num_elements() for variable in group])
            state |= {id(each): tf.reshape(piece, each.shape) for each, piece in zip(group, pieces, strict=True)}
        for variable, added in self.losses.add(sums[-1]) if self.losses else ():
            state[id(variable)] += added
        with keras.StatelessScope(state_mapping=[(each, state[id(each)]) for each in self.variables]):
            return metrics_result(self.model)


def all_reduced_results(model: keras.Model, losses: TrackedLosses | None = None) -> StepLogs:
    """The model's metrics over the examples of all replicas, in one collective; called on every replica."""
    results = AllReducedResults(model, losses)
    return results.results(sum_over_replicas(results.parts))


def run_custom_test_step(model: keras.Model, data: Batch, normalize: LossNormalization | None) -> StepLogs:
    """Runs a custom `test_step` on every replica, and returns the logs of the whole batch.

    The states of metrics are summed over the replicas. Scalars per replica, such as a returned loss or the argument of
    a `Mean`, are averaged, weighted by what the compiled losses divide by, or by the `weighting` of `DistributedFit`.
    A trial tells which of them are to be summed.

    Args:
        model: The model.
        data: The replica batch.
        normalize: Computes the weight of the replica batch, or `None` to weight by the number of examples.

    Raises:
        ValueError: The weight of a scalar is unknown.
    """
    replica_batch = ReplicaBatch.of(data)
    # An empty replica batch is filled with a row, so that the step can run; what it adds is discarded below.
    filled = replica_batch.filled(data)
    with recorded_terms(model) as terms, as_one_replica():
        reducer = LogReducer(model, filled, replica_batch, normalize, terms)
        with reducing_metrics(reducer):
            logs = reducer.reduce_logs(model.test_step(filled))
    reducer.discard_filler()
    return logs


def run_custom_train_step(
    model: keras.Model, data: Batch, *, summed: bool = False, scalars: NumberParts | None = None
) -> StepLogs:
    """Runs a custom `train_step` on every replica, and returns its logs over the whole batch.

    Numbers are summed, or averaged and weighted by examples: as `scalars` says, or else all alike.
    """
    replica_batch = ReplicaBatch.of(data)
    reducer = LogReducer(model, data, replica_batch, None, [], summed=summed, scalars=scalars)
    with reducing_metrics(reducer):
        return reducer.reduce_logs(model.train_step(data))


class LogReducer:
    """Reduces the metrics and logs of a custom step over the replicas; one for each replica.

    Args:
        model: The model.
        data: The replica batch, filled.
        batch: Its rows.
        normalize: Computes the weight of the replica batch in a `test_step`, or `None` to weight it by its rows.
        terms: The terms of the compiled losses that the step computes.
        summed: Whether numbers are summed of which a trial doesn't tell.
        scalars: What makes up the numbers of a `train_step`.
        exact: Whether numbers of a `train_step` are refused that can't be had of parts.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Batch,
        batch: ReplicaBatch,
        normalize: LossNormalization | None,
        terms: list[LossTerm],
        *,
        summed: bool = False,
        scalars: NumberParts | None = None,
        exact: bool = False,
    ) -> None:
        self.model, self.data, self.batch, self.normalize, self.terms = model, data, batch, normalize, terms
        self.summed, self.exact = summed, exact
        self.numbers = Cursor(self._scalars_of_test_step if normalize else lambda: scalars)
        self.metrics = step_metrics(model)
        self.variables = [variable for metric in self.metrics for variable in metric.variables]
        self._before = {} if batch.nonempty is None else {id(each): tf.identity(each.value) for each in self.variables}
        self._results: list[tf.Tensor] = []
        self._weight: tuple[tf.Tensor, bool] | None = None

    def weight(self, what: str) -> tuple[tf.Tensor, bool]:
        """The share of the whole batch, and whether the scalars are sums; errors name the scalar `what`."""
        if self._weight is None:
            normalizer = None
            if self.normalize is not None:
                normalizer = self.normalize.in_custom_step(self.model, self.data, self.terms, what)
            summed = self.summed if normalizer is None else normalizer.summed
            value = self.batch.rows if normalizer is None or summed else normalizer.value
            value = self.batch.weight(tf.cast(value, "float32"))
            (total,) = sum_over_replicas([value])
            self._weight = tf.math.divide_no_nan(value, total), summed
        return self._weight

    def reduce(self, scalar: Scalar, what: str, made_up_by: MadeUpBy | None) -> tf.Tensor:
        """The weighted mean of a scalar over the replicas, or its sum."""
        scalar = _as_scalar(scalar)
        if not scalar.dtype.is_floating:
            scalar = tf.cast(scalar, "float32")
        weight, summed = self.weight(what)
        return self._sum(scalar if is_sum_of_parts(made_up_by, summed) else scalar * tf.cast(weight, scalar.dtype))

    def counted(self, scalar: tf.Tensor, what: str) -> tf.Tensor:
        """A scalar that a `Mean` is given with a weight of its own, for each replica to count.

        Raises:
            ValueError: Parts of a batch don't give what the whole would.
        """
        made_up_by = self.numbers.next_update()
        if made_up_by is None:
            if self.normalize is not None:
                return self.reduce(scalar, what, None)
            return _sum_of_batch(scalar, self.weight(what)[0]) if self.summed else scalar
        if WEIGHTS not in made_up_by and self.normalize is not None:
            raise self.normalize.refusals.of_counted_scalar(self.model, what)
        if WEIGHTS not in made_up_by and self.exact:
            raise counted_scalar_refusal("train_step", self.model, what)
        if PRODUCTS in made_up_by:
            return scalar
        if self.exact and not {NUMBERS, MEANS} & made_up_by:
            raise weighted_scalar_refusal(self.model, what)
        return self.reduce(scalar, what, made_up_by)

    def added(self, scalar: tf.Tensor, what: str) -> tf.Tensor:
        """A scalar that a `Sum` is given, for each replica to add.

        Raises:
            ValueError: Parts of a batch don't give what the whole would.
        """
        made_up_by = self.numbers.next_update()
        if made_up_by and NUMBERS in made_up_by:
            return scalar
        if self.exact and MEANS not in (made_up_by or ()):
            raise added_scalar_refusal(self.model, what)
        reduced = self.reduce(scalar, what, made_up_by)
        return reduced * tf.cast(self.weight(what)[0], reduced.dtype)

    def _scalars_of_test_step(self) -> NumberParts | None:
        known = len(self.terms)
        found = scalars_of_test_step(self.model, self.data)
        # Those of the trial.
        del self.terms[known:]
        return found

    def _sum(self, scalar: tf.Tensor) -> tf.Tensor:
        """The sum over the replicas that have rows."""
        if self.batch.nonempty is not None:
            scalar = tf.where(self.batch.nonempty, scalar, tf.zeros_like(scalar))
        return sum_over_replicas([scalar])[0]

    def state(self, variable: keras.Variable) -> tf.Tensor:
        """A metric's variable on this replica, without the filler of an empty replica batch."""
        value = tf.convert_to_tensor(variable.value)
        nonempty = self.batch.nonempty
        return value if nonempty is None else tf.where(nonempty, value, self._before[id(variable)])

    def result(self, metric: keras.metrics.Metric, compute: Callable[[], Structure]) -> Structure:
        """A metric's result over the examples of all replicas."""
        variables = metric.variables
        if any(variable.aggregation != "sum" for variable in variables):
            return compute()
        sums = sum_over_replicas([self.state(variable) for variable in variables]) if variables else []
        with keras.StatelessScope(state_mapping=list(zip(variables, sums, strict=True))):
            result = compute()
        self._results += tf.nest.flatten(result)
        return result

    def reduce_logs(self, logs: StepLogs) -> StepLogs:
        """Reduces the logs that are not results of metrics."""

        def reduce(index: int, path: tuple[str | int, ...], leaf: Scalar) -> Scalar:
            if any(leaf is each for each in self._results):
                return leaf
            return self.reduce(leaf, f"{'.'.join(map(str, path))!r} in its logs", self.numbers.log(index))

        leaves = [reduce(index, *each) for index, each in enumerate(keras.tree.flatten_with_path(logs))]
        return keras.tree.pack_sequence_as(logs, leaves)

    def discard_filler(self) -> None:
        """Takes the filler of an empty replica batch out of the metrics."""
        if self.batch.nonempty is not None:
            for variable in self.variables:
                variable.assign(self.state(variable))


def _as_scalar(value: Scalar) -> tf.Tensor:
    """A tensor. Keras's mean over no elements is an empty vector if its shape is static, and otherwise a scalar."""
    value = tf.convert_to_tensor(value)
    return tf.zeros((), value.dtype) if value.shape == (0,) else value


def _sum_of_batch(part: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """What a part's sum is for a whole batch, whose mean over the parts by rows is the batch's sum."""
    return tf.math.divide_no_nan(part, tf.cast(share, part.dtype))


class _ReducingMetrics(MethodPatch):
    """Makes a model's metrics return results over all replicas."""

    def __init__(self, reducer: LogReducer, updates: bool):
        super().__init__()
        self.updates = updates
        self.reducers: dict[int, LogReducer] = {}
        self.metrics = reducer.metrics

    def patch_all(self) -> None:
        """Has every metric's result reduced over the replicas, and means of scalars too."""
        for metric in self.metrics:
            self.replace(metric, "result", functools.partial(self._result, metric, metric.result))
            if self.updates and type(metric).update_state is keras.metrics.Mean.update_state:
                update = functools.partial(self._update_mean, metric, metric.update_state)
                self.replace(metric, "update_state", update)
            elif self.updates and type(metric).update_state is keras.metrics.Sum.update_state:
                update = functools.partial(self._update_sum, metric, metric.update_state)
                self.replace(metric, "update_state", update)

    def _result(self, metric: keras.metrics.Metric, compute: Callable[[], Structure]) -> Structure:
        # A replica that runs its first slices reduces nothing, while another one runs its last.
        reducer = None if is_trial() else self.reducers.get(replica_index())
        return reducer.result(metric, compute) if reducer else compute()

    def _update_mean(
        self,
        metric: keras.metrics.Metric,
        update: Callable[..., None],
        values: Scalar,
        sample_weight: tf.Tensor | None = None,
    ) -> None:
        """Updates a `Mean` with values per example as before, and with a scalar reduced over the replicas."""
        values = _as_scalar(values)
        if values.shape.rank != 0 or is_trial():
            update(values, sample_weight=sample_weight)
            return
        reducer = self.reducers[replica_index()]
        what = f"the update of {metric.name!r}"
        if sample_weight is None:
            # A scalar for the whole batch, which counts once.
            sample_weight = reducer.weight(what)[0]
            values = reducer.reduce(values, what, reducer.numbers.next_update())
        else:
            values = reducer.counted(values, what)
        update(values, sample_weight=sample_weight)

    def _update_sum(
        self,
        metric: keras.metrics.Metric,
        update: Callable[..., None],
        values: Scalar,
        sample_weight: tf.Tensor | None = None,
    ) -> None:
        """Updates a `Sum` with values per example as before, and with a scalar such that the replicas' sum is right."""
        values = tf.convert_to_tensor(values)
        if values.shape.rank != 0 or is_trial():
            update(values, sample_weight=sample_weight)
        else:
            what = f"the update of {metric.name!r}"
            update(self.reducers[replica_index()].added(_times(values, sample_weight), what))


@contextlib.contextmanager
def reducing_metrics(reducer: LogReducer, *, updates: bool = True) -> Generator[None]:
    """Context in which a model's metrics return results over all replicas, and reduce their updates if asked."""
    with patched(reducer.model, lambda: _ReducingMetrics(reducer, updates)) as replacement:
        replacement.reducers[replica_index()] = reducer
        try:
            yield
        finally:
            del replacement.reducers[replica_index()]


class SliceNumbers:
    """Counts what a slice, or a micro-batch of a window, gives to metrics; one for each run of the step.

    Args:
        model: The model.
        share: The slice's share of the batch, or the rows of the micro-batch.
        scalars: What makes up the step's numbers.
        summed: Whether numbers are summed of which a trial doesn't tell.
        in_window: Whether it is a micro-batch of a window.
    """

    def __init__(
        self,
        model: keras.Model,
        share: tf.Tensor,
        scalars: NumberParts | None,
        *,
        summed: bool,
        in_window: bool = False,
    ):
        self.model, self.share, self.summed, self.in_window = model, share, summed, in_window
        self._numbers = Cursor(lambda: scalars)

    def of_mean(self, value: tf.Tensor) -> tf.Tensor:
        """A number that a `Mean` is given, to be weighted by `share`."""
        made_up_by = self._numbers.next_update()
        return self._sum(value) if is_sum_of_parts(made_up_by, self.summed) else value

    def counted(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """A number that a `Mean` is given with a weight of its own."""
        made_up_by = self._numbers.next_update()
        if made_up_by is None:
            return self._sum(value) if self.summed else value
        if WEIGHTS not in made_up_by:
            raise counted_scalar_refusal("train_step", self.model, what)
        if PRODUCTS in made_up_by:
            return value
        if {NUMBERS, BY_ROWS} <= made_up_by:
            return self._sum(value)
        if not self.in_window:
            raise weighted_scalar_refusal(self.model, what)
        return value

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        """The whole sum, of the sums that parts have."""
        # What a window adds up to isn't known before its end: a micro-batch's parts are the replicas'.
        share = self.share / sum_over_replicas([self.share])[0] if self.in_window else self.share
        return _sum_of_batch(value, share)

    def of_sum(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """A number that a `Sum` is given."""
        made_up_by = self._numbers.next_update() or set()
        if NUMBERS in made_up_by:
            return value
        if self.in_window or MEANS not in made_up_by:
            raise added_scalar_refusal(self.model, what, in_window=self.in_window)
        return tf.cast(value, self.share.dtype) * self.share


class _CountingMetrics(MethodPatch):
    """Makes a model's `Mean`s and `Sum`s count the number of a slice as a part of the batch's."""

    def __init__(self, model: keras.Model):
        super().__init__()
        self.model = model
        self.numbers: dict[int, SliceNumbers] = {}

    def patch_all(self) -> None:
        for metric in step_metrics(self.model):
            kinds = {
                keras.metrics.Mean.update_state: self._update_mean,
                keras.metrics.Sum.update_state: self._update_sum,
            }
            if replacement := kinds.get(type(metric).update_state):
                self.replace(metric, "update_state", functools.partial(replacement, metric.name, metric.update_state))

    def _update_mean(
        self, name: str, update: Callable[..., None], values: Scalar, sample_weight: tf.Tensor | None = None
    ) -> None:
        values = tf.convert_to_tensor(values)
        if values.shape.rank == 0 and not is_trial():
            numbers = self.numbers[replica_index()]
            if sample_weight is None:
                values, sample_weight = numbers.of_mean(values), numbers.share
            else:
                values = numbers.counted(values, f"the update of {name!r}")
        update(values, sample_weight=sample_weight)

    def _update_sum(
        self, name: str, update: Callable[..., None], values: Scalar, sample_weight: tf.Tensor | None = None
    ) -> None:
        values = tf.convert_to_tensor(values)
        if values.shape.rank != 0 or is_trial():
            update(values, sample_weight=sample_weight)
        else:
            numbers = self.numbers[replica_index()]
            update(numbers.of_sum(_times(values, sample_weight), f"the update of {name!r}"))


def _times(value: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    """A number that a `Sum` is given, times its weight."""
    return value if weight is None else value * tf.reduce_sum(tf.cast(weight, value.dtype))


@contextlib.contextmanager
def counting_numbers(numbers: SliceNumbers) -> Generator[None]:
    """Context of a slice or micro-batch, in which `Mean`s and `Sum`s count numbers as parts of the batch's."""
    with patched(numbers.model, lambda: _CountingMetrics(numbers.model)) as metrics:
        metrics.numbers[replica_index()] = numbers
        yield
