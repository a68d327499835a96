"""The lookups behind a `tf.IndexedSlices`, and where their row numbers come from, read off the graph."""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from keras_paragrad.compat.operations import SAME_BUFFER

# Operations that leave row numbers as they are.
_SAME_NUMBERS = SAME_BUFFER | {"Cast"}
# Operations whose first output, and gradients whose second output, is a vector of unique row numbers.
_UNIQUE = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
_SEGMENTS = {f"SparseSegment{reduction}GradV2" for reduction in ("Sum", "Mean", "SqrtN")}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
# Operations by which row numbers may be repeated for each example of a batch of static size.
_REPEATING = {"BroadcastTo", "Fill", "Tile"}
_READING = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
_ALIKE = {"OnesLike", "Shape", "ZerosLike"}
_OTHERS = {"ConcatV2", "Const", "GatherV2", "Pack", "ReadVariableOp"}
# By graph, whether row numbers depend on rows of a batch, by the names of the tensors: what loops over parts hide.
_RECORDED: weakref.WeakKeyDictionary[tf.Graph, dict[str, bool]] = weakref.WeakKeyDictionary()


def record_lookup(numbers: tf.Tensor, by_row: bool) -> None:
    """Records whether row numbers that were computed in parts of a batch depend on its rows."""
    if tf.is_symbolic_tensor(numbers):
        _RECORDED.setdefault(numbers.graph, {})[numbers.name] = by_row


class _Place(NamedTuple):
    """A tensor in a graph, and the calls of functions through which it was reached, innermost first."""

    tensor: tf.Tensor
    calls: tuple[tf.Operation, ...] = ()

    def source(self) -> "_Place | None":
        """The same tensor within the function that returns it, or where it is passed to this one."""
        operation, graph = self.tensor.op, self.tensor.graph
        if operation.type in _CALLS and (called := graph._get_function(operation.get_attr("f").name)):
            return _Place(called.graph.outputs[self.tensor.value_index], (operation, *self.calls))
        if operation.type == "Placeholder" and self.calls:
            position = [inside.op.name for inside in graph.inputs].index(operation.name)
            return _Place(self.calls[0].inputs[position], self.calls[1:])
        if operation.type == "Placeholder":
            captures: Any = getattr(graph, "captures", ())
            outside = next((outside for outside, inside in captures if inside.op.name == operation.name), None)
            return _Place(outside) if outside is not None else None
        return None


class Lookup(NamedTuple):
    """The row numbers of a lookup.

    Attributes:
        place: Where they are in the graph.
        size: How many there are, or -1 if that is known within a function alone.
    """

    place: _Place
    size: tf.Tensor | int

    def has_unique_rows(self) -> bool:
        """Whether the graph shows that row numbers are unique."""
        place: _Place | None = self.place
        while place is not None:
            operation = place.tensor.op
            if operation.type in _SAME_NUMBERS:
                place = place._replace(tensor=operation.inputs[place.tensor.value_index])
            elif operation.type in _UNIQUE | _SEGMENTS:
                return place.tensor.value_index == (1 if operation.type in _SEGMENTS else 0)
            else:
                place = place.source()
        return False

    def sources(self) -> "Iterator[_Place]":
        """All tensors that the row numbers are computed from."""
        return _sources(self.place)

    @property
    def recorded(self) -> bool | None:
        """Whether the row numbers depend on rows, if that was recorded."""
        return _recorded(self.place.tensor)

    def is_for_all_examples(self, rows: int | None = None) -> bool | None:
        """Whether the row numbers are the same for any examples, and any number of them; `None` if that isn't known.

        `rows` is the static number of examples of a part of a batch.
        """
        if self.recorded is not None:
            return not self.recorded
        sources = list(_sources(self.place))
        if any(_is_data(place) for place in sources):
            return False
        numbers, calls = self.place
        arguments = (calls[-1].graph if calls else numbers.graph).inputs
        sizes = {tensor.shape[0] for tensor in arguments if _is_data(_Place(tensor)) and tensor.shape.rank}
        sizes = {*sizes, rows} - {None}
        alike = [place.tensor for place in sources if _is_alike(place)]
        if alike:
            # A single row may stand for all examples, or be the row of a part that has one example.
            rows_of = [tensor.shape[0] for tensor in alike if tensor.op.type != "Shape"]
            return False if any(each in sizes - {1} for each in rows_of) else None
        shape = (numbers.op.inputs[0] if numbers.op.type == "Reshape" else numbers).shape
        if not sizes or not shape.rank or shape[0] not in {None, *sizes}:
            return True
        # In batches of a static size, numbers that are repeated for each example are constants, too.
        repeating = [place.tensor for place in sources if _may_repeat(place)]
        repeated = [tensor for tensor in repeating if tensor.shape.rank and tensor.shape[0] in sizes - {1}]
        if any(tf.is_symbolic_tensor(tensor) and tensor.op.type in _REPEATING for tensor in repeated):
            return False
        return None if repeating else True


def is_of_variables(tensor: tf.Tensor) -> bool:
    """Whether a tensor may be computed from variables: not if the graph shows that it isn't."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    tensors = [place.tensor for place in _sources(_Place(tensor))]
    return any(tf.is_symbolic_tensor(each) and each.op.type in _READING for each in tensors)


def lookups_of(rows: tf.Tensor) -> list[Lookup]:
    """The lookups whose row numbers were concatenated into `rows`; none in eager mode, which shows no sources."""
    if tf.executing_eagerly():
        return []
    places = list(_concatenated(_Place(rows)))
    return [
        Lookup(place, tf.size(place.tensor) if place.tensor.graph is rows.graph else place.tensor.shape[0] or -1)
        for place in places
    ]


def _recorded(numbers: tf.Tensor) -> bool | None:
    return _RECORDED.get(numbers.graph, {}).get(numbers.name)


def _concatenated(place: _Place) -> Iterator[_Place]:
    operation, source = place.tensor.op, place.source()
    if _recorded(place.tensor) is not None:
        yield place
    elif operation.type == "Identity":
        yield from _concatenated(place._replace(tensor=operation.inputs[0]))
    elif operation.type == "ConcatV2":
        for part in operation.inputs[:-1]:
            yield from _concatenated(place._replace(tensor=part))
    elif source is not None and operation.type in _CALLS:
        yield from _concatenated(source)
    else:
        yield place


def _sources(place: _Place) -> Iterator[_Place]:
    """All tensors that a tensor is computed from; of a tensor's shape, not those whose first axis alone is left out."""
    pending, seen = [place], set()
    while pending:
        current = pending.pop()
        key = (current.tensor.ref(), *current.calls)
        if key in seen:
            continue
        seen.add(key)
        yield current
        if not tf.is_symbolic_tensor(current.tensor):
            continue
        source = current.source()
        if source is not None:
            pending.append(source)
        elif not _is_size_of_example(current.tensor) and not _is_alike(current):
            pending += [current._replace(tensor=tensor) for tensor in current.tensor.op.inputs]


def _is_alike(place: _Place) -> bool:
    """Whether a tensor is read off the shape of some rows, or of a static number of them, and so not off data."""
    operation = place.tensor.op if tf.is_symbolic_tensor(place.tensor) else None
    if operation is None or operation.type not in _ALIKE:
        return False
    of = operation.inputs[0].op
    if of.type == "StridedSlice" and not of.get_attr("begin_mask") & of.get_attr("end_mask") & 1:
        return True
    return operation.type != "Shape" and bool(place.tensor.shape.rank) and place.tensor.shape[0] is not None


def _is_size_of_example(tensor: tf.Tensor) -> bool:
    """Whether a tensor holds sizes of another tensor's axes, but not of the first, the axis of the batch."""
    operation = tensor.op
    if operation.type == "Unpack":
        return operation.inputs[0].op.type == "Shape" and tensor.value_index > 0
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    begin: Any = tf.get_static_value(operation.inputs[1])
    return begin is not None and begin[0] % (operation.inputs[0].shape[0] or 1) > 0


def _is_data(place: _Place) -> bool:
    """Whether a tensor is an argument of the step."""
    kinds = ("Placeholder", "IteratorGetNext")
    return tf.is_symbolic_tensor(place.tensor) and place.tensor.op.type in kinds and place.source() is None


def _may_repeat(place: _Place) -> bool:
    """Whether a tensor may be another one, repeated for each example."""
    kind = place.tensor.op.type if tf.is_symbolic_tensor(place.tensor) else "Const"
    return kind in _REPEATING or (kind in _OTHERS and (place.tensor.shape.rank or 0) > 1)
