"""The metrics and logs of a custom step over several replicas.

A *scalar* or number is computed from a replica batch as a whole. Its *share* weights it in the mean over the replicas.
"""

import contextlib
import functools
from collections.abc import Callable, Generator

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica, replica_index, sum_over_replicas
from keras_paragrad.compat.model import step_metrics
from keras_paragrad.compat.state import MethodPatch, patched
from keras_paragrad.compat.types import Batch, Scalar, StepLogs, Structure
from keras_paragrad.engine.losses.counted_scalars import (
    MEANS,
    NUMBERS,
    PRODUCTS,
    WEIGHTS,
    MadeUpBy,
    NumberParts,
    is_sum_of_parts,
    scalars_of_test_step,
)
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.number_updates import as_mean, as_scalar, counting_numbers
from keras_paragrad.engine.losses.part_numbers import PartNumbers
from keras_paragrad.engine.losses.refusals import (
    counted_scalar_refusal,
    weighted_scalar_refusal,
)
from keras_paragrad.engine.losses.terms import LossTerm, recorded_terms
from keras_paragrad.engine.probes.trial import is_trial
from keras_paragrad.engine.replicas.replica_batch import ReplicaBatch


def run_custom_test_step(model: keras.Model, data: Batch, normalize: LossNormalization | None) -> StepLogs:
    """Runs a custom `test_step` on every replica, and returns the logs of the whole batch.

    The states of metrics are summed over the replicas. Scalars per replica, such as a returned loss or the argument of
    a `Mean`, are averaged, weighted by the divisor of the compiled losses or the `weighting` of `DistributedFit`; by
    rows, if `normalize` is `None`. A trial finds which scalars to sum instead.
    """
    replica_batch = ReplicaBatch.of(data)
    # An empty replica batch is filled with a row, so that the step can run; its contribution is discarded.
    filled = replica_batch.filled(data)
    with recorded_terms(model) as terms:
        return LogReducer(model, filled, replica_batch, normalize, terms).run(lambda: model.test_step(filled))


class LogReducer(PartNumbers):
    """Reduces the metrics and logs of a custom step over the replicas; one for each replica.

    Args:
        data, batch: The replica's data, filled if it has no rows, and its number of rows.
        normalize: Computes the weight of the replica batch in a `test_step`, or `None` to weight it by its rows.
        terms: The terms of the compiled losses that the step computes.
        summed: Whether to sum a number if no trial shows how parts make it up.
        scalars: How parts make up the numbers of a `train_step`.
        exact: Whether to refuse numbers of a `train_step` that parts don't make up.
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
        super().__init__(model, self._scalars_of_test_step if normalize else lambda: scalars, exact=exact)
        self.data, self.batch, self.normalize, self.terms, self.summed = data, batch, normalize, terms, summed
        self.metrics = step_metrics(model)
        self.variables = [variable for metric in self.metrics for variable in metric.variables]
        self._before = (
            {} if batch.nonempty is None else {id(variable): tf.identity(variable.value) for variable in self.variables}
        )
        # Results of metrics, which are reduced already, by which they are recognized in the logs.
        self._results: list[tf.Tensor] = []
        self._found: tuple[tf.Tensor, bool] | None = None

    def share(self, what: str) -> tf.Tensor:
        """This replica's share of the whole batch; errors name the scalar `what`."""
        return self._weight(what)[0]

    def _weight(self, what: str) -> tuple[tf.Tensor, bool]:
        """The share, and whether scalars of unknown make-up are summed; errors name the scalar `what`."""
        if self._found is None:
            normalizer = None
            if self.normalize is not None:
                normalizer = self.normalize.in_custom_step(self.model, self.data, self.terms, what)
            summed = self.summed if normalizer is None else normalizer.summed
            value = self.batch.rows if normalizer is None or summed else normalizer.value
            value = self.batch.weight(tf.cast(value, "float32"))
            (total,) = sum_over_replicas([value])
            self._found = tf.math.divide_no_nan(value, total), summed
        return self._found

    def of_batch(self, value: Scalar, what: str, made_up_by: MadeUpBy | None) -> tf.Tensor:
        """The weighted mean of a scalar over the replicas, or its sum."""
        scalar = as_scalar(value)
        if not scalar.dtype.is_floating:
            scalar = tf.cast(scalar, "float32")
        weight, summed = self._weight(what)
        return self._sum(scalar if is_sum_of_parts(made_up_by, summed) else scalar * tf.cast(weight, scalar.dtype))

    def weighted(self, value: tf.Tensor, what: str, made_up_by: MadeUpBy | None) -> tf.Tensor:
        """The number to give to a `Mean` with a weight, whose states are summed over the replicas."""
        if made_up_by is None:
            if self.normalize is not None:
                return self.of_batch(value, what, None)
            return as_mean(value, self.share(what)) if self.summed else value
        if WEIGHTS not in made_up_by and self.normalize is not None:
            raise counted_scalar_refusal("test_step", self.model, what, self.normalize.divider.parts)
        if WEIGHTS not in made_up_by and self.exact:
            raise counted_scalar_refusal("train_step", self.model, what)
        if PRODUCTS in made_up_by:
            # Summing the states adds up weights and products as they are.
            return value
        if self.exact and not {NUMBERS, MEANS} & made_up_by:
            raise weighted_scalar_refusal(self.model, what)
        return self.of_batch(value, what, made_up_by)

    def _scalars_of_test_step(self) -> NumberParts | None:
        known = len(self.terms)
        numbers = scalars_of_test_step(self.model, self.data)
        # The trial has recorded terms as well.
        del self.terms[known:]
        return numbers

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
        """A metric's result over the examples of all replicas; `compute` is its own `result`."""
        variables = metric.variables
        if any(variable.aggregation != "sum" for variable in variables):
            return compute()
        sums = sum_over_replicas([self.state(variable) for variable in variables]) if variables else []
        with keras.StatelessScope(state_mapping=list(zip(variables, sums, strict=True))):
            result = compute()
        self._results += tf.nest.flatten(result)
        return result

    def _reduce_logs(self, logs: StepLogs) -> StepLogs:
        """Reduces the logs that are not results of metrics."""

        def reduce(index: int, path: tuple[str | int, ...], leaf: Scalar) -> Scalar:
            if any(leaf is result for result in self._results):
                return leaf
            return self.of_batch(leaf, f"{'.'.join(map(str, path))!r} in its logs", self.made_up_by(index))

        leaves = [reduce(index, *entry) for index, entry in enumerate(keras.tree.flatten_with_path(logs))]
        return keras.tree.pack_sequence_as(logs, leaves)

    def run(self, step: Callable[[], StepLogs], *, updates: bool = True) -> StepLogs:
        """Runs a step as on one replica, and returns its logs over all replicas; `updates` as in `reducing_metrics`."""
        with as_one_replica(), reducing_metrics(self, updates=updates):
            logs = self._reduce_logs(step())
        self._discard_filler()
        return logs

    def _discard_filler(self) -> None:
        """Removes the filler of an empty replica batch from the metrics."""
        if self.batch.nonempty is not None:
            for variable in self.variables:
                variable.assign(self.state(variable))


class _ReducedResults(MethodPatch):
    """Makes every metric return its result over all replicas."""

    def __init__(self, metrics: list[keras.metrics.Metric]):
        super().__init__()
        self.metrics = metrics
        self.reducers: dict[int, LogReducer] = {}

    def patch_all(self) -> None:
        """Replaces `result` of each metric."""
        for metric in self.metrics:
            self.replace(metric, "result", functools.partial(self._result, metric, metric.result))

    def _result(self, metric: keras.metrics.Metric, compute: Callable[[], Structure]) -> Structure:
        # Replicas are traced in turns: while one runs its last slice, another may run earlier ones, without a reducer.
        reducer = None if is_trial() else self.reducers.get(replica_index())
        return reducer.result(metric, compute) if reducer else compute()


@contextlib.contextmanager
def reducing_metrics(reducer: LogReducer, *, updates: bool = True) -> Generator[None]:
    """Context in which a model's metrics return results over all replicas, and reduce their updates if requested."""
    counting = counting_numbers(reducer.model, reducer) if updates else contextlib.nullcontext()
    with patched(reducer.model, lambda: _ReducedResults(reducer.metrics)) as results, counting:
        results.reducers[replica_index()] = reducer
        try:
            yield
        finally:
            del results.reducers[replica_index()]
