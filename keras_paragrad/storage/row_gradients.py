"""Gradients that may be `tf.IndexedSlices`: scaled, added, and summed over the replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, sum_over_replicas
from keras_paragrad.compat.optimizer import is_linear
from keras_paragrad.compat.state import warn_once
from keras_paragrad.compat.types import GradientTensor, Scalar
from keras_paragrad.storage.lookups import Lookup, lookups_of

# What becomes of the sum over replicas of a lookup's gradients, which has those of all of them one after the other.
Merge = Callable[[Any], Any]


def sum_gradients(gradients: Sequence[GradientTensor]) -> list[GradientTensor]:
    """Sums gradients over the replicas, dense or `tf.IndexedSlices`; other tensors as well.

    Optimizers square and clip the gradient of each lookup of a row. Lookups for each example are each replica's own.
    What is looked up once for all examples, as positions are, all replicas have looked up: their gradients are added,
    as are those of rows that each replica has looked up once, in a product with a sparse matrix.
    """
    lookups = [_split_lookups(gradient) for gradient in gradients]
    sums = iter(sum_over_replicas([lookup for group in lookups for lookup, _ in group]))
    return [_concatenate([merge(next(sums)) for _, merge in group]) for group in lookups]


def scale_gradient(gradient: GradientTensor | None, factor: Scalar) -> Any:
    """A gradient, dense or `tf.IndexedSlices` or `None`, times a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = scale_gradient(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def is_overwritten(variable: Any) -> bool:
    """Whether the "gradient" is the variable's new value, as for float8 scales: it is neither summed nor scaled."""
    return getattr(variable, "overwrite_with_gradient", False)


def scale_gradients(
    gradients: Sequence[GradientTensor | None], variables: Sequence[Any], factor: Scalar
) -> list[GradientTensor | None]:
    """Multiplies gradients by a scalar; leaves the new values of float8 scales as they are."""
    pairs = zip(gradients, variables, strict=True)
    return [gradient if is_overwritten(variable) else scale_gradient(gradient, factor) for gradient, variable in pairs]


def add_gradients(one: Any, other: Any) -> Any:
    """The sum of two gradients, each dense or `tf.IndexedSlices` or `None`."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        # Rows are not summed: Keras's optimizers square and clip the gradient of each lookup.
        rows = tf.concat([one.values, other.values], 0)
        return tf.IndexedSlices(rows, tf.concat([one.indices, other.indices], 0), other.dense_shape)
    if isinstance(other, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(one, other.indices[:, tf.newaxis], other.values)
    return tf.convert_to_tensor(one) + other


def sum_dtype(variable: keras.Variable) -> str:
    """The dtype in which the gradients of a variable are summed."""
    return "float64" if variable.dtype == "float64" else "float32"


def accumulate_gradient(
    variable: keras.Variable, total: GradientTensor | None, gradient: Any, factor: Scalar | None = None
) -> Any:
    """Returns `total + factor * gradient`; for float8 scales, the larger of the two."""
    gradient = tf.cast(gradient, sum_dtype(variable))
    if is_overwritten(variable):
        return gradient if total is None else tf.maximum(total, gradient)  # pyright: ignore
    return add_gradients(total, gradient if factor is None else scale_gradient(gradient, factor))


def warn_of_lookups(
    optimizer: keras.optimizers.Optimizer, own: Sequence[Any], sums: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    """Warns once of lookups that may have been one for all examples, and whose gradients weren't added."""
    if is_linear(optimizer):
        return
    triples = zip(own, sums, variables, strict=True)
    names = [variable.path for gradient, total, variable in triples if _is_undecided(gradient, total)]
    if names:
        warn_once(
            optimizer,
            f"Whether {', '.join(names)} is looked up once for all examples, as by positions, or for each of them is "
            f"unknown. It is taken to be for each; if it isn't, {optimizer.name} takes another step than one device's. "
            "Look positions up by table(keras.ops.arange(n)), without an axis of examples, in a table of their own, "
            "and leave run_eagerly=True out.",
        )


def _is_undecided(own: Any, total: Any) -> bool:
    if not (isinstance(own, tf.IndexedSlices) and isinstance(total, tf.IndexedSlices)):
        return False
    if tf.executing_eagerly():
        return bool(_is_repeated(total.indices, replica_count()))
    lookups = lookups_of(own.indices)
    found = [lookup.is_for_all_examples() for lookup in lookups]
    return None in found or (True in found and not _can_split(lookups))


def _split_lookups(gradient: GradientTensor) -> list[tuple[GradientTensor, Merge]]:
    """Splits a gradient by lookups of the variable, with what becomes of their sums."""
    lookups = lookups_of(gradient.indices) if isinstance(gradient, tf.IndexedSlices) else []
    merges = [_merge_of(lookup) for lookup in lookups]
    if set(merges) <= {_keep} or not _can_split(lookups):
        return [(gradient, _keep)]
    if len(lookups) == 1:
        return [(gradient, merges[0])]
    sizes = [lookup.size for lookup in lookups]
    parts = zip(tf.split(gradient.values, sizes), tf.split(gradient.indices, sizes), merges, strict=True)
    return [(tf.IndexedSlices(values, rows, gradient.dense_shape), merge) for values, rows, merge in parts]


def _can_split(lookups: Sequence[Lookup]) -> bool:
    return [isinstance(lookup.size, int) and lookup.size < 0 for lookup in lookups].count(True) < 2


def _merge_of(lookup: Lookup) -> Merge:
    if lookup.has_unique_rows():
        return _add_rows
    return _add_replicas if lookup.is_for_all_examples() else _keep


def _keep(total: Any) -> Any:
    return total


def _add_rows(total: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds the gradients of each row."""
    rows, positions = tf.unique(total.indices)
    values = tf.math.unsorted_segment_sum(total.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, total.dense_shape)


def _add_replicas(total: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds the replicas' gradients, if they have looked up the same rows: not those that each has drawn."""
    count, values, rows = replica_count(), total.values, total.indices

    def added() -> tuple[tf.Tensor, tf.Tensor]:
        blocks = tf.reshape(values, tf.concat([[count, -1], tf.shape(values)[1:]], 0))
        return tf.reduce_sum(blocks, 0), rows[: tf.size(rows) // count]

    values, rows = tf.cond(_is_repeated(rows, count), added, lambda: (values, rows))
    return tf.IndexedSlices(values, rows, total.dense_shape)


def _is_repeated(rows: tf.Tensor, times: int) -> tf.Tensor:
    """Whether a vector is another one, so many times."""
    size = tf.size(rows) // times
    return tf.logical_and(tf.size(rows) % times == 0, tf.reduce_all(rows[size:] == rows[: tf.size(rows) - size]))


def _concatenate(lookups: list[Any]) -> Any:
    if len(lookups) == 1:
        return lookups[0]
    values, rows = (tf.concat([getattr(lookup, name) for lookup in lookups], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, rows, lookups[0].dense_shape)
