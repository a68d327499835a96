"""Gradients that may be `tf.IndexedSlices`: scaled, added, and summed over the replicas."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, sum_over_replicas
from keras_paragrad.compat.optimizer import is_linear
from keras_paragrad.compat.state import warn_once
from keras_paragrad.compat.types import GradientTensor, Scalar
from keras_paragrad.storage.lookups import Lookup, lookups_of, record_lookup

# What becomes of the sum over replicas of a lookup's gradients, which has those of all of them one after the other.
Merge = Callable[[Any], Any] | None


def sum_gradients(gradients: Sequence[GradientTensor]) -> list[GradientTensor]:
    """Sums gradients over the replicas, dense or `tf.IndexedSlices`; other tensors as well.

    Optimizers square and clip the gradient of each lookup of a row. Lookups for each example are each replica's own.
    What is looked up once for all examples, as positions are, all replicas have looked up: their gradients are added,
    as are those of rows that each replica has looked up once, in a product with a sparse matrix.
    """
    lookups = [_split_lookups(gradient) for gradient in gradients]
    sums = iter(sum_over_replicas([lookup for group in lookups for lookup, _ in group]))
    return [join_lookups([merge(next(sums)) if merge else next(sums) for _, merge in group]) for group in lookups]


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


class Lookups(NamedTuple):
    """The gradient of a table in a part of a batch: the gradients of its lookups.

    Keras's optimizers square and clip the gradient of each lookup by itself, so lookups of the same row aren't added.

    Attributes:
        by_example: The lookups of rows that examples name. The lookups of all parts are concatenated.
        shared: The lookups of the same rows for all examples, such as positions. The values of all parts are added.
        shape: The table's shape.
        are_shared: For each lookup, whether it is shared.
    """

    by_example: tf.IndexedSlices | None
    shared: tf.IndexedSlices | None
    shape: Sequence[int]
    are_shared: tuple[bool, ...]

    @classmethod
    def split(cls, gradient: Any, are_shared: tuple[bool, ...], shape: Sequence[int]) -> "Lookups":
        """Splits a table's gradient; all its lookups are by example if `are_shared` is empty."""
        if not any(are_shared):
            return cls(gradient, None, shape, are_shared)
        pieces = list(zip(are_shared, gradients_of_lookups(gradient, lookups_of(gradient.indices)), strict=True))
        by_example, shared = ([piece for kind, piece in pieces if kind is of] for of in (False, True))
        return cls(join_lookups(by_example) if by_example else None, join_lookups(shared), shape, are_shared)

    @classmethod
    def of_part(cls, gradient: Any, table: keras.Variable, optimizer: Any, rows: int | None, before: Any = None) -> Any:
        """Splits the gradient of a variable in a part; returns it dense, if it isn't of lookups, or of unique rows.

        `rows` is the part's static number of examples. The result `before` for another part, if there is one, decides
        which lookups are shared.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        lookups = lookups_of(gradient.indices)
        if any(lookup.has_unique_rows() for lookup in lookups):
            return tf.convert_to_tensor(gradient)
        if isinstance(before, Lookups):
            if tf.executing_eagerly() and _are_alike(before.by_example, gradient):
                _warn_undecided(optimizer, [table])
            return cls.split(gradient, before.are_shared, before.shape)
        found = [lookup.is_for_all_examples(rows) for lookup in lookups]
        if None in found or (any(found) and not can_split(lookups)):
            _warn_undecided(optimizer, [table])
        return cls.split(gradient, tuple(map(bool, found)) if can_split(lookups) else (), list(table.shape))

    def __add__(self, other: Any) -> Any:
        """Adds another part's."""
        by_example, shared, *_ = self
        if by_example is not None:
            by_example = join_lookups([by_example, other.by_example])
        if shared is not None:
            # A loop begins with zeros, without row numbers.
            shared = tf.IndexedSlices(shared.values + other.shared.values, other.shared.indices, shared.dense_shape)
        return self._replace(by_example=by_example, shared=shared)

    @property
    def rows(self) -> list[tf.Tensor]:
        """The tensors that are concatenated over the parts."""
        return [] if self.by_example is None else [self.by_example.values, self.by_example.indices]

    @property
    def sums(self) -> list[tf.Tensor]:
        """The tensors that are added; row numbers are the same in all parts."""
        return [] if self.shared is None else [self.shared.values, self.shared.indices]

    def with_tensors(self, rows: Iterator[tf.Tensor], sums: Iterator[tf.Tensor]) -> "Lookups":
        """The same with the next tensors in place of `rows` and `sums`."""
        by_example, shared = (
            group and tf.IndexedSlices(next(tensors), next(tensors), tf.constant(list(self.shape)))
            for group, tensors in zip(self[:2], (rows, sums), strict=True)
        )
        return self._replace(by_example=by_example, shared=shared)

    def joined(self) -> tf.IndexedSlices:
        """The gradient of a batch, if these are the lookups of all its parts."""
        groups = [group for group in self[:2] if group is not None]
        for group in groups:
            record_lookup(group.indices, group is self.by_example)
        return join_lookups(groups)


def _are_alike(one: Any, other: tf.IndexedSlices) -> bool:
    """Whether two parts may have looked up rows once for all examples, or unique ones: eager mode shows no sources."""
    rows, others = (np.asarray(each.indices) for each in (one, other))
    unique = len(set(others)) == len(others) and not set(rows).isdisjoint(others)
    return unique or np.array_equal(rows, others)


def dense_if_linear(optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
    """A dense gradient in place of lookups, if that is the same step.

    Where an optimizer has scattered into a variable once, TensorFlow copies the variable each time that it is read.
    """
    looked_up = isinstance(gradient, tf.IndexedSlices)
    return tf.convert_to_tensor(gradient) if looked_up and is_linear(optimizer) else gradient


def accumulate_gradient(variable: keras.Variable, total: Any, gradient: Any, factor: Scalar | None = None) -> Any:
    """Returns `total + factor * gradient`; for float8 scales, the larger of the two."""
    if isinstance(total, Lookups):
        return total + gradient
    gradient = tf.cast(gradient, "float64" if variable.dtype == "float64" else "float32")
    if is_overwritten(variable):
        return gradient if total is None else tf.maximum(total, gradient)
    gradient = gradient if factor is None else scale_gradient(gradient, factor)
    return gradient if total is None else total + gradient


def warn_of_lookups(
    optimizer: keras.optimizers.Optimizer, own: Sequence[Any], sums: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    """Warns once of lookups that may have been one for all examples, and whose gradients weren't added."""
    triples = zip(own, sums, variables, strict=True)
    _warn_undecided(optimizer, [variable for gradient, total, variable in triples if _is_undecided(gradient, total)])


def _warn_undecided(optimizer: keras.optimizers.Optimizer | None, tables: Sequence[keras.Variable]) -> None:
    if tables and optimizer is not None and not is_linear(optimizer):
        warn_once(
            optimizer,
            f"Whether {', '.join(table.path for table in tables)} is looked up once for all examples, as by positions, "
            f"or for each of them is unknown. It is taken to be for each; if it isn't, {optimizer.name} takes another "
            "step than one device's. Look positions up by table(keras.ops.arange(n)), without an axis of examples, in "
            "a table of their own, and leave run_eagerly=True out.",
        )


def _is_undecided(own: Any, total: Any) -> bool:
    if not (isinstance(own, tf.IndexedSlices) and isinstance(total, tf.IndexedSlices)):
        return False
    if tf.executing_eagerly():
        return bool(_is_repeated(total.indices, replica_count()))
    lookups = lookups_of(own.indices)
    found = [lookup.is_for_all_examples() for lookup in lookups]
    return None in found or (True in found and not can_split(lookups))


def _split_lookups(gradient: GradientTensor) -> list[tuple[GradientTensor, Merge]]:
    """Splits a gradient by lookups of the variable, with what becomes of their sums."""
    lookups = lookups_of(gradient.indices) if isinstance(gradient, tf.IndexedSlices) else []
    merges = [
        _add_rows if lookup.has_unique_rows() else _add_replicas if lookup.is_for_all_examples() else None
        for lookup in lookups
    ]
    if not any(merges) or not can_split(lookups):
        return [(gradient, None)]
    return list(zip(gradients_of_lookups(gradient, lookups), merges, strict=True))


def gradients_of_lookups(gradient: Any, lookups: Sequence[Lookup]) -> list[tf.IndexedSlices]:
    """The gradient of each lookup."""
    if len(lookups) == 1:
        return [gradient]
    sizes = [lookup.size for lookup in lookups]
    pairs = zip(tf.split(gradient.values, sizes), tf.split(gradient.indices, sizes), strict=True)
    return [tf.IndexedSlices(*pair, gradient.dense_shape) for pair in pairs]


def can_split(lookups: Sequence[Lookup]) -> bool:
    """Whether a gradient can be split into those of its lookups: the size of one may be unknown."""
    return [isinstance(lookup.size, int) and lookup.size < 0 for lookup in lookups].count(True) < 2


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


def join_lookups(lookups: Sequence[Any]) -> Any:
    """The lookups of one table as one gradient."""
    if len(lookups) == 1:
        return lookups[0]
    values, rows = (tf.concat([getattr(lookup, name) for lookup in lookups], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, rows, lookups[0].dense_shape)
