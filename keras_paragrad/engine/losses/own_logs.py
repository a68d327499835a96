"""Logs of a custom `train_step` or `test_step`, over the examples of all replicas."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.method_patch import MethodPatch, patched
from keras_paragrad.engine.losses.normalization import LossNormalization
from keras_paragrad.engine.losses.terms import LossTerm, recorded_terms
from keras_paragrad.engine.losses.undivided import not_divided_by_replicas
from keras_paragrad.engine.probes.trial import is_trial
from keras_paragrad.engine.replicas.shard import Shard


def evaluated_by_own_step(model: Any, data: Any, normalize: LossNormalization | None) -> dict[str, Any]:
    """What the model's own `test_step` returns, the same on every replica; called on every replica.

    Metrics that see every example are summed over the replicas. A number for a whole batch, such as a loss that a
    `Mean` is given or that the step returns, is put together by what it divides by: what the compiled losses divide
    by, if the step computes one, or as `weighting` says.

    Args:
        model: The model.
        data: This replica's part of a batch.
        normalize: Measures the weight of the part, or `None` to count its examples.

    Raises:
        ValueError: It can't be known what a number divides by. The message says what to write.
    """
    shard = Shard.of(data)
    filled = shard.filled(data)
    with recorded_terms(model) as terms, not_divided_by_replicas():
        part = _Part(model, filled, shard, normalize, terms)
        with _over_all_replicas(part, outputs_scale=1 / replica_count()):
            logs = part.put_together(model.test_step(filled))
    part.forget_what_is_not_there()
    return logs


def trained_by_own_step(model: Any, data: Any) -> dict[str, Any]:
    """What the model's own `train_step` returns, the same on every replica, each counted by its examples."""
    shard = Shard.of(data)
    part = _Part(model, data, shard, None, ())
    with _over_all_replicas(part, outputs_scale=1.0):
        return part.put_together(model.train_step(data))


class _Part:
    """One replica's part of a batch, in a custom step."""

    def __init__(
        self, model: Any, data: Any, shard: Shard, normalize: LossNormalization | None, terms: Sequence[LossTerm]
    ) -> None:
        self.model, self.data, self.shard, self.normalize, self.terms = model, data, shard, normalize, terms
        # An overridden `metrics` property may leave some out.
        every = [*model.metrics, *keras.Model.metrics.fget(model)]  # pyright: ignore
        self.metrics: list[Any] = list({id(metric): metric for metric in every}.values())
        self.variables = [variable for metric in self.metrics for variable in metric.variables]
        self._before = {} if shard.nonempty is None else {id(each): tf.identity(each.value) for each in self.variables}
        self._results: list[Any] = []
        self._share: tuple[tf.Tensor, bool] | None = None

    def share(self, what: str) -> tuple[tf.Tensor, bool]:
        """This part's share in the batch, and whether its numbers are sums.

        Args:
            what: What the number is that has to be put together.
        """
        if self._share is None:
            weight = (
                None if self.normalize is None else self.normalize.in_own_step(self.model, self.data, self.terms, what)
            )
            value = tf.cast(self.shard.rows, "float32") if weight is None or weight.summed else weight.value
            value = self.shard.weight(tf.cast(value, "float32"))
            (total,) = sum_over_replicas([value])
            self._share = tf.math.divide_no_nan(value, total), weight is not None and weight.summed
        return self._share

    def of_all(self, number: Any, what: str) -> tf.Tensor:
        """A number of this part, put together with those of the other replicas' parts."""
        number = _number(number)
        if not number.dtype.is_floating:
            number = tf.cast(number, "float32")
        share, summed = self.share(what)
        there = number if self.shard.nonempty is None else tf.where(self.shard.nonempty, number, tf.zeros_like(number))
        return sum_over_replicas([there if summed else there * tf.cast(share, number.dtype)])[0]

    def state(self, variable: keras.Variable) -> tf.Tensor:
        """What this replica has added to a metric's variable, without an example that isn't there."""
        value = tf.convert_to_tensor(variable.value)
        return (
            value if self.shard.nonempty is None else tf.where(self.shard.nonempty, value, self._before[id(variable)])
        )

    def result(self, metric: Any, compute: Callable[[], Any]) -> Any:
        """A metric's result over the examples of all replicas."""
        variables = metric.variables
        if any(variable.aggregation != "sum" for variable in variables):
            return compute()
        sums = sum_over_replicas([self.state(variable) for variable in variables]) if variables else []
        with keras.StatelessScope(state_mapping=list(zip(variables, sums, strict=True))):
            found = compute()
        self._results += tf.nest.flatten(found)
        return found

    def put_together(self, logs: Any) -> Any:
        """Logs, in which what is no metric's result is put together."""

        def of_all(path: tuple, leaf: Any) -> Any:
            is_result = any(leaf is each for each in self._results)
            return leaf if is_result else self.of_all(leaf, f"{'.'.join(map(str, path))!r} in its logs")

        leaves = [of_all(*each) for each in keras.tree.flatten_with_path(logs)]
        return keras.tree.pack_sequence_as(logs, leaves)

    def forget_what_is_not_there(self) -> None:
        """Takes back what a replica without examples has added to metrics."""
        if self.shard.nonempty is not None:
            for variable in self.variables:
                variable.assign(self.state(variable))


def _number(value: Any) -> tf.Tensor:
    """A tensor; Keras's mean of no elements, known to be none, is an empty vector, and that of others a scalar."""
    value = tf.convert_to_tensor(value)
    return tf.zeros((), value.dtype) if value.shape == (0,) else value


class _OverAllReplicas(MethodPatch):
    """A model's metrics, whose results are those of all replicas."""

    def __init__(self, part: _Part, outputs_scale: float):
        super().__init__()
        self.parts: dict[int, _Part] = {}
        self.metrics, self.model, self.outputs_scale = part.metrics, part.model, outputs_scale

    def patch_all(self) -> None:
        of_outputs = self.model._compile_loss.metrics if self.model._compile_loss else []
        for metric in self.metrics:
            self.replace(metric, "result", functools.partial(self._result, metric, metric.result))
            if type(metric).update_state is keras.metrics.Mean.update_state:
                scale = self.outputs_scale if any(metric is each for each in of_outputs) else 1.0
                update = functools.partial(self._update_mean, metric, metric.update_state, scale)
                self.replace(metric, "update_state", update)

    def _result(self, metric: Any, compute: Callable[[], Any]) -> Any:
        return compute() if is_trial() else self.parts[replica_index()].result(metric, compute)

    def _update_mean(
        self, metric: Any, update: Callable[..., None], scale: float, values: Any, sample_weight: Any = None
    ) -> None:
        values = _number(values)
        values = values if scale == 1 else values * scale
        if values.shape.rank != 0 or sample_weight is not None or is_trial():
            update(values, sample_weight=sample_weight)
            return
        # One number for the batch, which counts once.
        part = self.parts[replica_index()]
        what = f"the update of {metric.name!r}"
        update(part.of_all(values, what), sample_weight=part.share(what)[0])


@contextlib.contextmanager
def _over_all_replicas(part: _Part, outputs_scale: float) -> Iterator[None]:
    with patched(part.model, lambda: _OverAllReplicas(part, outputs_scale)) as replacement:
        replacement.parts[replica_index()] = part
        yield
