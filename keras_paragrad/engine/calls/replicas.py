"""Every replica runs a step on the whole batch, but calls layers on its own share.

A whole tensor is the same on all replicas, and so is its gradient. With the rows Y = (y_1, ..., y_R) of R replicas,

    own     Y -> y_r                gradient: gather
    gather  y_r -> Y                gradient: own
    copy    w -> w, for own rows    gradient: total
    total   w_r -> sum_r w_r        gradient: copy

(Megatron's conjugate collectives), so a call y_r = f(own(X), copy(w)), Y = gather(y_r) has any derivative of f(X, w).
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, replica_index, replicas_are_local, sum_over_replicas
from keras_paragrad.compat.layers import has_gradient, mask_of, with_mask
from keras_paragrad.compat.model import step_metrics
from keras_paragrad.compat.types import Batch, LossArguments
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, rows_at, rows_of
from keras_paragrad.engine.calls.sources import is_needed, is_zero, split_lookups
from keras_paragrad.engine.losses.dividers import IndivisibleError
from keras_paragrad.engine.losses.known_classes import metrics_are_known
from keras_paragrad.engine.losses.logs import overrides_compute_metrics, update_metrics
from keras_paragrad.storage.row_gradients import join_lookups
from keras_paragrad.storage.sharding import all_gather

# Collectives add integers as float64, which can't represent all integers of 64 bits.
_LONG = (tf.int64, tf.uint64)


class GatheredRows:
    """Which rows of a batch this replica has: `count` of `total` rows, from row `first` on."""

    def __init__(self, first: Any, count: Any, total: Any):
        self.first, self.count, self.total = first, count, total
        # The rows that `own` cuts out of whole tensors. `Share` has others.
        self._begin, self._length = first, count

    @classmethod
    def of_replicas(cls, count: Any) -> "GatheredRows":
        """The rows of all replicas, one replica after the other. This replica has `count` rows."""
        here = tf.one_hot(replica_index(), replica_count(), dtype=tf.float32)
        (counts,) = sum_over_replicas([here * tf.cast(count, "float32")])
        counts = tf.cast(counts, "int32")
        return cls(tf.reduce_sum(counts[: replica_index()]), count, tf.reduce_sum(counts))

    def gather(self, tensors: Sequence[Any]) -> list[Any]:
        """Makes tensors with the rows of all replicas, from this replica's `count` rows of each tensor."""
        if replicas_are_local():
            return [tf.ensure_shape(all_gather(tensor), [self._static, *tensor.shape[1:]]) for tensor in tensors]
        # Sums rows with zeros around them, as `all_gather` mixes up several sizes in one step.
        sums = sum_over_replicas([self._padded(tensor) for tensor in tensors])
        return [self._unpadded(total, tensor) for total, tensor in zip(sums, tensors, strict=True)]

    def own(self, rows: Sequence[Any]) -> list[Any]:
        """This replica's rows of whole tensors."""
        return [self._own(row) if isinstance(row, tf.Tensor) and has_gradient(row) else self._cut(row) for row in rows]

    def _cut(self, row: Any) -> Any:
        return rows_at(row, self._begin, self._length, in_bounds=True)

    def _own(self, whole: tf.Tensor) -> Any:
        @tf.custom_gradient
        def own(whole: tf.Tensor) -> Any:
            def gradient(local: Any) -> Any:
                needed = is_needed(whole) and not is_zero(local)
                return self.whole([tf.convert_to_tensor(local)])[0] if needed else None

            return self._cut(whole), gradient

        return own(whole)

    def whole(self, locals_: Sequence[tf.Tensor]) -> list[Any]:
        """As `gather`, and differentiable. The gradient of a replica's rows is its share of the whole gradient."""

        def gather(*tensors: tf.Tensor) -> Any:
            def gradient(*wholes: Any) -> list[Any]:
                # Weights that lead to unused outputs only get no gradient, as on one device, rather than zeros.
                return [None if is_zero(each) else self.own([tf.convert_to_tensor(each)])[0] for each in wholes]

            return self.gather([tensor[: self.count] for tensor in tensors]), gradient

        others = [index for index, tensor in enumerate(locals_) if not has_gradient(tensor)]
        gathered = self.gather([locals_[index][: self.count] for index in others])
        results = _map_differentiable(gather, locals_)
        for index, tensor in zip(others, gathered, strict=True):
            results[index] = tensor
        return results

    @property
    def _static(self) -> int | None:
        return self.total if isinstance(self.total, int) else None

    def _padded(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.dtype in _LONG:
            tensor = tf.bitcast(tensor, tf.int32)
        elif tensor.dtype.is_bool:
            tensor = tf.cast(tensor, "int32")
        elif tensor.dtype == tf.string:
            raise IndivisibleError(
                "A batch of strings can't be sent between workers. Turn them into numbers in the dataset: "
                "dataset.map(lambda x, y: (vectorize(x), y))."
            )
        after = self.total - self.first - self.count
        around = tf.concat([[[self.first, after]], tf.zeros([tensor.shape.rank - 1, 2], "int32")], 0)
        return tf.pad(tensor, around)  # pyright: ignore

    def _unpadded(self, total: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
        total = tf.bitcast(total, tensor.dtype) if tensor.dtype in _LONG else tf.cast(total, tensor.dtype)
        return tf.ensure_shape(total, [self._static, *tensor.shape[1:]])


def _map_differentiable(function: Callable[..., Any], tensors: Sequence[Any]) -> list[Any]:
    """Maps tensors by a function with a custom gradient. Tensors without a gradient stay as they are."""
    results = list(tensors)
    real = [index for index, tensor in enumerate(results) if isinstance(tensor, tf.Tensor) and has_gradient(tensor)]
    if real:
        replaced: Any = tf.custom_gradient(function)(*(results[index] for index in real))
        replaced = replaced if isinstance(replaced, (list, tuple)) else [replaced]
        for index, tensor in zip(real, replaced, strict=True):
            results[index] = tensor
    return results


def gather_batch(data: Batch, count: tf.Tensor) -> Batch:
    """The batch of all replicas, from this replica's `data`, which has `count` rows."""
    rows = GatheredRows.of_replicas(count)
    leaves = keras.tree.flatten(data)
    dense = [index for index, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    for index, whole in zip(dense, rows.gather([leaves[index][:count] for index in dense]), strict=True):
        leaves[index] = whole
    return keras.tree.pack_sequence_as(
        data,
        [
            leaf if leaf is None or index in dense else _gather_composite(leaf, rows)
            for index, leaf in enumerate(leaves)
        ],
    )


def _gather_composite(leaf: Any, rows: GatheredRows) -> Any:
    """The rows of all replicas of a ragged or sparse tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf[: rows.count]
        lengths = rows.gather([leaf.row_lengths()])[0]
        values: Any = leaf.values
        entries = GatheredRows.of_replicas(rows_of(values))
        values = (
            _gather_composite(values, entries) if isinstance(values, tf.RaggedTensor) else entries.gather([values])[0]
        )
        ragged: Any = tf.RaggedTensor
        return ragged.from_row_lengths(values, lengths, validate=False)
    entries = GatheredRows.of_replicas(tf.shape(leaf.values)[0])
    shift = tf.concat([[rows.first], tf.zeros([leaf.shape.rank - 1], "int32")], 0)
    indices, values = entries.gather([leaf.indices + tf.cast(shift, "int64"), leaf.values])
    whole = tf.SparseTensor(indices, values, tf.concat([[tf.cast(rows.total, "int64")], leaf.dense_shape[1:]], 0))
    whole.set_shape([None, *leaf.shape[1:]])
    return whole


class Share(GatheredRows):
    """This replica's share of a call's rows. A replica without a row computes the last row, and drops the result."""

    def __init__(self, rows: Sequence[Any]):
        static = rows[0].shape[0]
        total: Any = rows_of(rows[0]) if static is None else static
        first = total * replica_index() // replica_count()
        super().__init__(first, total * (replica_index() + 1) // replica_count() - first, total)
        at_least, at_most = (tf.maximum, tf.minimum) if static is None else (max, min)
        self._begin, self._length = at_most(first, total - 1), at_least(self.count, 1)
        # Whether this replica has rows.
        self.nonempty = self.count > 0

    def copy(self, tensors: Sequence[tf.Tensor], rows: Sequence[Any]) -> list[Any]:
        """Tensors for a function of this replica's `rows`, whose gradients are summed over the replicas."""

        def copy(*given: tf.Tensor) -> Any:
            def gradient(*cotangents: Any) -> list[Any]:
                pairs = zip(given, cotangents, strict=True)
                wanted = [index for index, (one, of) in enumerate(pairs) if not is_zero(of) and is_needed(one)]
                found = dict(zip(wanted, self._total([cotangents[index] for index in wanted], rows), strict=True))
                return [found.get(index) for index in range(len(given))]

            return [tf.identity(each) for each in given], gradient

        return _map_differentiable(copy, tensors)

    def _total(self, gradients: list[Any], rows: Sequence[Any]) -> list[Any]:
        """Sums gradients over the replicas. Lookups that depend on rows are concatenated instead."""
        split = [split_lookups(gradient, rows, gradient.shape) for gradient in gradients]
        tensors: list[Any] = []
        for gradient, lookups in zip(gradients, split, strict=True):
            if lookups is None:
                tensors.append(tf.convert_to_tensor(gradient))
            else:
                groups = [lookups.by_example, lookups.shared and lookups.shared.values]
                tensors += [each for each in groups if each is not None]
        sums = iter(self._sums(list(map(self._live, tensors))))
        totals = []
        for lookups in split:
            if lookups is None:
                totals.append(next(sums))
                continue
            by_example, shared = lookups.by_example and next(sums), lookups.shared
            shared = shared and tf.IndexedSlices(next(sums), shared.indices, shared.dense_shape)
            totals.append(join_lookups([each for each in (by_example, shared) if each is not None]))
        return totals

    def _sums(self, tensors: list[Any]) -> list[Any]:
        """Sums tensors over the replicas. `IndexedSlices` are concatenated instead."""
        looked_up = [isinstance(tensor, tf.IndexedSlices) for tensor in tensors]
        sums: list[Any] = []

        def total(*given: tf.Tensor) -> Any:
            values = map(tf.identity, given)
            sums[:] = sum_over_replicas(
                [
                    tf.IndexedSlices(value, of.indices, of.dense_shape) if lookup else value
                    for value, of, lookup in zip(values, tensors, looked_up, strict=True)
                ]
            )

            def gradient(*wholes: Any) -> list[Any]:
                dense = [
                    tf.convert_to_tensor(each) for each, lookup in zip(wholes, looked_up, strict=True) if not lookup
                ]
                copies = iter(self.copy(dense, ()))
                return [
                    GatheredRows.of_replicas(rows_of(value)).own([tf.convert_to_tensor(whole)])[0]
                    if lookup
                    else next(copies)
                    for value, whole, lookup in zip(given, wholes, looked_up, strict=True)
                ]

            return [each.values if lookup else each for each, lookup in zip(sums, looked_up, strict=True)], gradient

        if not tensors:
            return []
        flat: Any = tf.custom_gradient(total)(
            *(each.values if lookup else each for each, lookup in zip(tensors, looked_up, strict=True))
        )
        flat = list(flat) if isinstance(flat, (list, tuple)) else [flat]
        return [
            tf.IndexedSlices(each, of.indices, of.dense_shape) if lookup else each
            for each, of, lookup in zip(flat, sums, looked_up, strict=True)
        ]

    def _live(self, gradient: Any) -> Any:
        """A gradient, or zeros on a replica without rows. There, the dropped row's gradient may be NaN."""
        if self.nonempty is True:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._live(gradient.values), gradient.indices, gradient.dense_shape)
        return tf.where(self.nonempty, gradient, tf.zeros_like(gradient))


@contextlib.contextmanager
def metrics_of_one_device(model: keras.Model) -> Generator[None]:
    """Context in which each replica has all metrics' states, and updates them with whole batches.

    Outside, reading a state sums it over the replicas. So afterwards only the first replica keeps it.
    """
    variables = [variable for metric in step_metrics(model) for variable in metric.variables]
    summed = list({id(variable): variable for variable in variables if variable.aggregation == "sum"}.values())
    for variable, total in zip(summed, sum_over_replicas([tf.identity(each.value) for each in summed]), strict=True):
        variable.assign(total)
    yield
    if replica_index() > 0:
        for variable in summed:
            variable.assign(tf.zeros_like(variable.value))


def update_metrics_of(model: keras.Model, batch: LossArguments, replica_batch: ReplicaBatch) -> None:
    """Updates Keras's own metrics with this replica's examples, and others with all replicas' examples."""
    outputs = keras.tree.flatten(batch["y_pred"])
    if replica_count() == 1 or metrics_are_known(model) or not all(output.shape.rank for output in outputs):
        replica_batch.run(lambda: update_metrics(model, batch))
        return
    masks = list(map(mask_of, outputs))
    x = batch["x"] if overrides_compute_metrics(model) else None
    whole: Any = gather_batch((x, batch["y"], outputs, batch["sample_weight"], masks), replica_batch.rows)
    x, y, outputs, weights, masks = whole
    y_pred = keras.tree.pack_sequence_as(batch["y_pred"], list(map(with_mask, outputs, masks)))
    with metrics_of_one_device(model):
        update_metrics(model, {"x": x, "y": y, "y_pred": y_pred, "sample_weight": weights})
