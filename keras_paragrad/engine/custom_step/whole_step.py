"""Runs a custom `train_step` on the whole batch on each replica, and divides only its layer calls.

For steps that compare rows, clip gradients themselves, or have a divisor that no weighting names. Each of the R
replicas has all rows and computes the same loss, except that in a layer call, replica r computes the outputs y_r of its
share of the rows, and gathers Y = (y_1, ..., y_R).

The loss is L = 1/R sum_s L_s, with L_s on replica s a function of Y and of the weights w. So

    dL/dw = 1/R sum_r ( (sum_s dL_s/dY)[rows of r] dy_r/dw + dL_r/dw ):

gathering sums its gradient over the replicas, and the weights' gradients are averaged over them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import (
    replica_count,
    replica_index,
    replicas_are_traced_apart,
    sum_over_replicas,
)
from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.model import train_step_of
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.state import log_once
from keras_paragrad.compat.types import Batch, Gradients, StepLogs, Structure
from keras_paragrad.engine.custom_step.analysis import ApplyCall
from keras_paragrad.engine.custom_step.call_trial import find_divided_calls
from keras_paragrad.engine.custom_step.divided_calls import differentiates, has_rows, intercepting, rows_of_leaf
from keras_paragrad.engine.custom_step.run import changed_calls_error, next_call
from keras_paragrad.engine.custom_step.step import CustomStep, prepare_optimizers
from keras_paragrad.engine.custom_step.step_graph import StepGraph
from keras_paragrad.engine.losses.log_reducer import LogReducer
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.replicas.batch_statistics import counting_examples
from keras_paragrad.engine.replicas.replica_batch import ReplicaBatch, rows_of
from keras_paragrad.engine.step.apply import apply_gradient
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.storage.row_gradients import scale_gradient, scale_gradients, sum_gradients
from keras_paragrad.storage.sharding import all_gather

_log = logging.getLogger("keras_paragrad")
# Draw from a state in a variable, which differs between replicas.
_STATEFUL_RANDOM = ("StatefulStandard", "StatefulUniform", "StatefulTruncated", "StatefulRandom", "Rng", "NonDet")
_DIFFERENT = "A call of a layer in train_step gets tensors with different numbers of rows."


class WholeStep:
    """A custom `train_step` on the whole batch, analyzed for the shapes of a replica batch.

    Raises:
        IndivisibleError: Replicas would compute different results, or no layer call can be divided.
    """

    def __init__(self, model: keras.Model, data: Batch):
        self.model = model
        if not replicas_are_traced_apart():
            raise IndivisibleError("All replicas of a TPU run the same program.")
        trace, whole = _Trace(), keras.tree.map_structure(_of_all_replicas, data)
        graph = StepGraph(model, whole, trace)
        _check_same_everywhere(graph, trace)
        self.calls = [ApplyCall(apply.optimizer, apply.variables, apply.present, 0) for apply in graph.applies]
        if any(find_accumulator(call.optimizer) for call in self.calls):
            raise graph.refusal("is to accumulate gradients of whole batches")
        self.reduced_late = trace.reduced_late(graph)
        self.divides = find_divided_calls(model, self.calls, whole)
        if len(self.divides) != len(trace.calls):
            raise changed_calls_error(model)
        if not any(self.divides):
            raise graph.refusal("calls no layer whose rows are independent")
        prepare_optimizers(self.calls)

    def describe(self) -> str:
        """Describes how the step is divided."""
        return (
            f"Rows can't be divided in the train_step of {type(self.model).__name__}. Each replica runs it on all "
            f"rows, and {sum(self.divides)} of {len(self.divides)} calls of layers on its share of them."
        )

    def run(self, data: Batch) -> StepLogs:
        """Runs the step on the batch of all replicas, and returns its logs."""
        batch = keras.tree.map_structure(lambda leaf: None if leaf is None else _gather_rows(leaf), data)
        # Metrics and logs come from one replica, as if the others had no rows.
        counted = ReplicaBatch(rows_of(batch), tf.constant(replica_index() == 0))
        return LogReducer(self.model, batch, counted, None, []).run(lambda: self._run(batch))

    def _run(self, batch: Batch) -> StepLogs:
        calls = iter(self.calls)

        def apply(optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: list[keras.Variable]) -> None:
            call = next_call(self.model, calls, optimizer)
            mean = scale_gradients(gradients, call.variables, 1 / replica_count())
            with not_capturing():
                apply_gradient(call.optimizer, call.variables, mean, whole=True)

        handler = _OnReplica(self.model, self.divides, self.reduced_late)
        with capturing_applies(apply) as not_capturing, intercepting(handler):
            return train_step_of(self.model)(batch)


def divide_on_replicas(model: keras.Model, data: Batch, normalize: LossNormalization) -> CustomStep | WholeStep:
    """Analyzes a custom `train_step`: divides its rows, or else its layer calls, or refuses it."""
    try:
        return CustomStep(model, data, normalize)
    # Noise drawn for all rows of a batch doesn't fit a part of them.
    except (ValueError, tf.errors.InvalidArgumentError) as refusal:
        if normalize.weighting != "auto":
            raise
        try:
            step = WholeStep(model, data)
        except (ValueError, tf.errors.InvalidArgumentError) as other:
            _log.debug("Nor can its calls be divided: %s", other)
            raise refusal from None
        _log.debug("%s", refusal)
        log_once(model, step.describe())
    return step


class _Trace:
    """Records layer calls, and the results of `tape.gradient`, in a graph that never runs."""

    def __init__(self) -> None:
        # The positions in the graph at which each call begins and ends.
        self.calls: list[tuple[int, int]] = []
        # The results of each `tape.gradient`, and the position after it.
        self._gradients: list[tuple[list[Any], int]] = []

    def call(self, call: Callable[..., Structure], arguments: Any, keywords: Any) -> Any:
        begin = _operation_count()
        outputs = call(*arguments, **keywords)
        self.calls.append((begin, _operation_count()))
        return keras.tree.map_structure(_watched, outputs)

    def gradient(self, compute: Callable[[], Any]) -> Any:
        gradients = compute()
        self._gradients.append((tf.nest.flatten(gradients), _operation_count()))
        return gradients

    def reduced_late(self, graph: StepGraph) -> list[bool]:
        """For each `tape.gradient`, whether only optimizers use its results, so that `apply` can sum them."""
        position = {operation.name: index for index, operation in enumerate(graph.operations)}
        applied = {id(gradient) for call in graph.applies for gradient in call.gradients}
        logged = {id(log) for log in graph.logs}

        def goes_to_optimizers(gradient: Any, end: int) -> bool:
            tensors = (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else (gradient,)
            used = any(position[use.name] >= end for tensor in tensors for use in tensor.consumers())
            return not used and id(gradient) in applied and id(gradient) not in logged

        return [
            all(gradient is None or goes_to_optimizers(gradient, end) for gradient in gradients)
            for gradients, end in self._gradients
        ]


def _check_same_everywhere(graph: StepGraph, trace: _Trace) -> None:
    """Refuses steps that would compute different results on each replica from the same rows."""
    if graph.losses:
        raise graph.refusal("calls layers that add losses of rows")
    inside = {index for begin, end in trace.calls for index in range(begin, end)}
    for index, operation in enumerate(graph.operations):
        if index not in inside and operation.type.startswith(_STATEFUL_RANDOM):
            raise graph.refusal(f"draws random numbers from a tf.random.Generator ({operation.type})")


class _OnReplica:
    """Divides layer calls between replicas, and reduces gradients over them."""

    def __init__(self, model: keras.Model, divides: Sequence[bool], reduced_late: Sequence[bool]):
        self.model, self._divides, self._late = model, iter(divides), iter(reduced_late)

    def call(self, call: Callable[..., Structure], arguments: Any, keywords: Any) -> Any:
        divides = next(self._divides, None)
        if divides is None:
            raise changed_calls_error(self.model)
        if not divides:
            # The call gets all rows, even if this replica's batch is empty.
            with counting_examples(None):
                return call(*arguments, **keywords)
        share = _Share([leaf for leaf in keras.tree.flatten((arguments, keywords)) if has_rows(leaf)])
        positional, named = keras.tree.map_structure(share.cut, (arguments, keywords))
        with counting_examples(share.count > 0):
            outputs = call(*positional, **named)
        return keras.tree.map_structure(share.gather, outputs)

    def gradient(self, compute: Callable[[], Any]) -> Any:
        late = next(self._late, None)
        if late is None:
            raise changed_calls_error(self.model)
        gradients = compute()
        return gradients if late else tf.nest.map_structure(_mean_over_replicas, gradients)


class _Share:
    """A replica's share of a call's rows. A replica without rows computes the last row, and drops the result."""

    def __init__(self, tensors: Sequence[Any]):
        sizes = {tensor.shape[0] for tensor in tensors} - {None}
        if len(sizes) > 1:
            raise IndivisibleError(f"{_DIFFERENT} {sizes}")
        static = tensors[0].shape[0]
        rows: Any = tf.shape(tensors[0])[0] if static is None else static
        checks = [
            tf.debugging.assert_equal(tf.shape(tensor)[0], rows, _DIFFERENT)
            for tensor in tensors[1:]
            if static is None or tensor.shape[0] is None
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            rows = tf.identity(rows) if static is None else rows
        begin = rows * replica_index() // replica_count()
        self.count = rows * (replica_index() + 1) // replica_count() - begin
        self._rows = _Rows(begin, self.count)
        at_least = max if static is not None else tf.maximum
        at_most = min if static is not None else tf.minimum
        self._first, self._length = at_most(begin, rows - 1), at_least(self.count, 1)

    def cut(self, leaf: Any) -> Any:
        """Cuts this replica's rows from an argument."""
        return rows_of_leaf(leaf, self._first, self._first + self._length)

    def gather(self, output: Any) -> Any:
        """Gathers all replicas' rows of an output."""
        if not has_rows(output):
            return output
        mask = mask_of(output)
        whole = self._rows.gather(output[: self.count])
        return with_mask(whole, None if mask is None else _gather_rows(mask[: self.count]))


class _Rows:
    """The `count` rows of a batch that this replica has, from row `begin` on."""

    def __init__(self, begin: Any, count: Any):
        self.begin, self.count = begin, count

    def gather(self, local: tf.Tensor) -> Any:
        """Gathers all rows; the gradient is summed over the replicas."""

        @tf.custom_gradient
        def gather(local: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
            return _gather_rows(local), self._scatter

        return gather(local)

    def _scatter(self, upstream: Any) -> Any:
        """The gradient of `gather`: sums over the replicas, and takes this replica's rows. Differentiable itself."""
        _check_differentiates()

        @tf.custom_gradient
        def scatter(whole: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
            (total,) = sum_over_replicas([tf.identity(whole)])
            return total[self.begin : self.begin + self.count], lambda local: self.gather(tf.convert_to_tensor(local))

        return scatter(tf.convert_to_tensor(upstream))


def _watched(output: Any) -> Any:
    """Wraps an output, in a graph that never runs, so that only `tape.gradient` can differentiate it."""

    @tf.custom_gradient
    def watch(whole: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            _check_differentiates()
            return upstream

        return tf.identity(whole), gradient

    return with_mask(watch(output), mask_of(output)) if has_rows(output) else output


def _check_differentiates() -> None:
    if not differentiates():
        raise IndivisibleError(
            "Its train_step takes gradients otherwise than by tape.gradient, where other replicas' gradients can't be "
            "added."
        )


def _gather_rows(rows: tf.Tensor) -> tf.Tensor:
    """Gathers the rows of all replicas."""
    # Not every collective supports booleans.
    dtype = "int32" if rows.dtype.is_bool else rows.dtype
    whole = tf.cast(all_gather(tf.cast(rows, dtype)), rows.dtype)
    whole.set_shape([None, *rows.shape[1:]])
    return whole


def _mean_over_replicas(gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return scale_gradient(sum_gradients([gradient])[0], 1 / replica_count())

    return _mean(gradient)


@tf.custom_gradient
def _mean(tensor: tf.Tensor) -> Any:
    """Averages over the replicas; its gradient is averaged too."""
    (total,) = sum_over_replicas([tf.identity(tensor)])
    return total / tf.cast(replica_count(), total.dtype), _mean


def _of_all_replicas(tensor: tf.Tensor | None) -> tf.TensorSpec | None:
    """The spec of all replicas' rows together; replicas have the same number of rows if it is static."""
    if tensor is None:
        return None
    rows, *inner = tensor.shape
    return tf.TensorSpec([rows and rows * replica_count(), *inner], tensor.dtype)


def _operation_count() -> int:
    return len(tf.compat.v1.get_default_graph().get_operations())
