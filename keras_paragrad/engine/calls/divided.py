"""`divided`: computes a function of rows in parts of the rows. The result is differentiable to any order.

The parts of f(x, w) with rows x_1, ..., x_n give

    rows   y = (y_1, ..., y_n),  y_i = f(x_i, w)                      concatenated
    sums   s = s_1 + ... + s_n                                        added

and so do the parts of its gradient, for cotangents y' and s':

    rows   x'_i = y'_i dy_i/dx_i + s' ds_i/dx_i
    sums   w'  = sum_i (y'_i dy_i/dw + s' ds_i/dw)

So the gradient of a divided function is a divided function of the rows (x, y') and of (w, s'). No part keeps its
activations: the gradient computes each part again, from the state (seeds, moving averages) that the part began with.

The gradient of a table (an embedding) has an entry for each lookup, and optimizers square each entry. Lookups that
depend on rows are concatenated. Other lookups, such as those of positions, are the same in all parts, and are added.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from keras_paragrad.compat.layers import has_gradient
from keras_paragrad.compat.private import stop_recording
from keras_paragrad.engine.batches.replica_batch import rows_at, rows_of
from keras_paragrad.engine.calls.sources import differentiating, is_needed, is_zero, split_lookups
from keras_paragrad.storage.row_gradients import Lookups


class Result(NamedTuple):
    """What a part gives: tensors to concatenate, tensors to add, and the state after it."""

    rows: list[Any]
    sums: list[Any]
    state: list[Any]


# Maps a part's rows, tensors that all parts read, and the state before the part to its result.
Function = Callable[[list[Any], list[Any], list[Any]], Result]


class RowParts(Protocol):
    """Computes a function in parts of its rows."""

    def run(
        self, function: Function, rows: list[Any], whole: list[Any], state: list[Any], before: Any
    ) -> tuple[Result, Any]:
        """The result for all rows, and the state before each part. Given `before`, parts begin with its items."""
        ...


def divided(
    function: Function, rows: list[Any], whole: list[Any], parts: RowParts, state: list[Any], before: Any = None
) -> Result:
    """Computes a function in parts of its rows.

    All parts read the tensors that are `whole`, such as weights. The first part begins with `state`, and each other
    part with the state that the part before has left. If given, `before` has a state for each part to begin with.
    """
    inputs, count = [*rows, *whole], len(rows)
    indices = [index for index, tensor in enumerate(inputs) if isinstance(tensor, tf.Tensor) and has_gradient(tensor)]
    computed: list[Result] = []

    def run(*tensors: tf.Tensor):
        every = list(inputs)
        for index, tensor in zip(indices, tensors, strict=True):
            every[index] = tensor
        result, states = parts.run(function, every[:count], every[count:], state, before)
        computed.append(result)
        outputs = [*result.rows, *result.sums]

        def gradient(*cotangents: Any, variables: Any = None) -> list[Any]:
            assert not variables, "functions that read variables aren't divided"
            needed = [index for index, tensor in zip(indices, tensors, strict=True) if is_needed(tensor)]
            given = {
                index: tf.convert_to_tensor(cotangent)
                for index, (output, cotangent) in enumerate(zip(outputs, cotangents, strict=True))
                if has_gradient(output) and not is_zero(cotangent)
            }
            if not needed or not given:
                return [None] * len(indices)
            backward = _Backward(function, needed, count, list(given), len(result.rows))
            of_rows = [cotangent for index, cotangent in given.items() if index < len(result.rows)]
            of_sums = list(given.values())[len(of_rows) :]
            # Parts wait for the cotangents: otherwise they would be computed again right away, and stay in memory.
            with tf.control_dependencies(list(given.values())):
                total = divided(backward, [*every[:count], *of_rows], [*every[count:], *of_sums], parts, [], states)
            gradients = dict(zip(needed, backward.gradients(total), strict=True))
            # A gathered weight may have another dtype than its shards.
            return [
                None if gradients.get(index) is None else tf.cast(gradients[index], tensor.dtype)
                for index, tensor in zip(indices, tensors, strict=True)
            ]

        return outputs, gradient

    if not indices:
        run()
        return computed[-1]
    flat: Any = tf.custom_gradient(run)(*(inputs[index] for index in indices))
    flat, last = list(flat) if isinstance(flat, (list, tuple)) else [flat], computed[-1]
    return Result(flat[: len(last.rows)], flat[len(last.rows) :], last.state)


class _Backward:
    """The gradient of a function, with the function's rows, `whole` and cotangents as arguments.

    The first `count` inputs of the function are rows, and inputs of the indices `needed` have a gradient. The first
    `outputs` of its outputs are rows, and outputs of the indices `targets` have a cotangent.
    """

    def __init__(self, function: Function, needed: list[int], count: int, targets: list[int], outputs: int):
        self.function, self.needed, self.count, self.targets, self.outputs = function, needed, count, targets, outputs
        # For each needed input, by the last trace: its `Lookups`, or whether its gradient is rows; `None` without one.
        self._kinds: list[Any] = []

    def __call__(self, rows: list[Any], whole: list[Any], state: list[Any]) -> Result:
        of_sums = sum(index >= self.outputs for index in self.targets)
        inputs, weights = rows[: self.count], whole[: len(whole) - of_sums]
        every = [*inputs, *weights]
        sources = [every[index] for index in self.needed]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            result = self.function(inputs, weights, state)
        outputs, cotangents = [*result.rows, *result.sums], [*rows[self.count :], *whole[len(weights) :]]
        with differentiating(sources):
            gradients = tape.gradient([outputs[index] for index in self.targets], sources, cotangents)
        self._kinds, collected = [], Result([], [], [])
        for index, source, gradient in zip(self.needed, sources, gradients, strict=True):
            # An optimizer doesn't update a weight whose gradient is `None`.
            lookups = split_lookups(gradient, rows, source.shape) if index >= self.count else None
            self._kinds.append(lookups or (None if gradient is None else index < self.count))
            if lookups is not None:
                collected.rows.extend(lookups.rows)
                collected.sums.extend(lookups.sums)
            elif gradient is not None:
                (collected.rows if index < self.count else collected.sums).append(tf.convert_to_tensor(gradient))
        return collected

    def gradients(self, total: Result) -> Iterator[Any]:
        """The gradient of each needed input, from the results of all parts."""
        rows, sums = iter(total.rows), iter(total.sums)
        for kind in self._kinds:
            if isinstance(kind, Lookups):
                yield kind.with_tensors(rows, sums).joined()
            else:
                yield None if kind is None else next(rows if kind else sums)


def _add(sums: list[Any], others: list[Any]) -> list[Any]:
    """Adds the sums of two parts. Row numbers of lookups aren't added, as all parts have the same."""
    return [one + other if has_gradient(one) else other for one, other in zip(sums, others, strict=True)]


class RowSlices(NamedTuple):
    """Slices of at most `size` rows, computed one after the other.

    Attributes:
        size: The most rows of a slice.
        by_xla: Whether XLA compiles each slice.
        in_xla: Whether XLA compiles the caller of the slices, and needs static shapes.
        full: The number of slices, if all are full and rows after them are ignored; `None` to compute all rows.
        add: Adds the sums of two slices.
    """

    size: int | tf.Tensor
    by_xla: bool = False
    in_xla: bool = False
    full: tf.Tensor | None = None
    add: Callable[[list[Any], list[Any]], list[Any]] = _add

    def run(
        self, function: Function, rows: list[Any], whole: list[Any], state: list[Any], before: Any
    ) -> tuple[Result, Any]:
        """Runs full slices in a loop, and the rest after it; see `RowParts`.

        Where the number of rows isn't static, all slices run in the loop, and the last one has fewer rows.
        """
        static: int | None = rows[0].shape[0]

        def inputs_of(index: Any, length: Any, carried: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
            start = carried if before is None else [states[index] for states in before]
            # XLA checks the bounds of slices even in a loop that never runs.
            known = not self.in_xla or not isinstance(length, int)
            return rows_at(rows, index * self.size, length, in_bounds=known), whole, start

        if tf.executing_eagerly():
            return self._in_python(function, inputs_of, static or int(rows_of(rows[0])), state)
        count: Any = rows_of(rows[0]) if static is None else static
        looped = (count - 1) // self.size if self.in_xla and static is None else count // self.size
        rest: Any = count - looped * self.size
        length: Any = self.size
        if self.full is not None:
            looped, rest = self.full, 0
        elif static is None and not self.in_xla:
            looped, rest, length = -(-count // self.size), 0, None
        # In a lambda, as `tf.function` copies the attributes of a callable object, some of which are its own names.
        traced = tf.function(lambda *given: function(*given), autograph=False, jit_compile=self.by_xla or None)

        def compute(index: Any, carried: list[Any], rows: Any = length) -> tuple[Result, list[Any]]:
            rows = tf.minimum(self.size, count - index * self.size) if rows is None else rows
            inputs = inputs_of(index, rows, carried)
            return traced(*inputs), inputs[2]

        # A part's gradient is traced by a tape of its own, and the loop's gradient is `divided`'s. So no other tape
        # records what follows: a persistent tape would build a gradient of the loop at once.
        static = length if isinstance(length, int) else None
        like: Result = traced.get_concrete_function(*_specs(rows, whole, state, before, static)).structured_outputs
        if tf.is_tensor(rest) or rest:
            size = rest if isinstance(rest, int) else None
            traced.get_concrete_function(*_specs(rows, whole, state, before, size))
        traces = traced.experimental_get_tracing_count()
        with stop_recording():
            outputs, states, sums, after = self._in_loop(compute, like, looped, state, before)
            if tf.is_tensor(rest) or rest:
                last, start = compute(looped, after, rest)
                outputs = [tf.concat(pair, 0) for pair in zip(outputs, last.rows, strict=True)]
                states = [tf.concat([some, final[None]], 0) for some, final in zip(states, start, strict=False)]
                sums, after = self.add(sums, last.sums), last.state
        assert traced.experimental_get_tracing_count() == traces, "what is traced here has no gradients"
        return Result(outputs, sums, after), states if before is None else before

    def _in_loop(
        self, compute: Callable[..., tuple[Result, list[Any]]], like: Result, slices: Any, state: list[Any], before: Any
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Returns rows, states before slices, sums, and the last state, of full slices. `like` has specs of results."""
        # The loop begins with zero sums, or if their shapes are unknown, with the sums of the first slice.
        peeled = not all(value.shape.is_fully_defined() for value in like.sums)
        recorded = [] if before is not None else state
        arrays = [
            tf.TensorArray(value.dtype, slices, element_shape=value.shape, infer_shape=False)
            for value in [*like.rows, *recorded]
        ]
        sums: list[Any] = [] if peeled else [tf.zeros(value.shape, value.dtype) for value in like.sums]
        index = 0
        if peeled:
            first, start = compute(0, state)
            arrays = [array.write(0, value) for array, value in zip(arrays, [*first.rows, *start], strict=False)]
            index, sums, state = 1, first.sums, first.state

        def body(index: tf.Tensor, arrays: list[tf.TensorArray], sums: list[Any], carried: list[Any]) -> Any:
            result, start = compute(index, carried)
            arrays = [array.write(index, value) for array, value in zip(arrays, [*result.rows, *start], strict=False)]
            return index + 1, arrays, self.add(sums, result.sums), result.state

        loop = tf.constant(index), arrays, sums, state if before is None else []
        shapes = tf.nest.map_structure(_shape_of, loop)
        _, arrays, sums, after = tf.while_loop(
            lambda index, *_: index < slices, body, loop, shape_invariants=shapes, parallel_iterations=1
        )
        outputs = [_join(*pair) for pair in zip(arrays, like.rows, strict=False)]
        return outputs, [array.stack() for array in arrays[len(outputs) :]], sums, after

    def _in_python(
        self, function: Function, inputs_of: Callable[..., Any], count: int, state: list[Any]
    ) -> tuple[Result, Any]:
        results, starts, size = [], [], int(self.size)
        for index in range(-(-count // size) if self.full is None else int(self.full)):
            inputs = inputs_of(index, min(size, count - index * size), state)
            starts.append(inputs[2])
            results.append(function(*inputs))
            state = results[-1].state
        sums = results[0].sums
        for result in results[1:]:
            sums = self.add(sums, result.sums)
        rows = [tf.concat(pieces, 0) for pieces in zip(*(result.rows for result in results), strict=True)]
        return Result(rows, sums, state), [list(states) for states in zip(*starts, strict=True)]


def _specs(rows: list[Any], whole: list[Any], state: list[Any], before: Any, count: int | None) -> Any:
    """The specs of a part of `count` rows, or of any number of rows if `None`."""
    start = state if before is None else [states[0] for states in before]
    return [spec_of_part(row, count) for row in rows], *(
        [tf.type_spec_from_value(each) for each in some] for some in (whole, start)
    )


def spec_of_part(row: Any, count: int | None) -> Any:
    """The spec of a part of a tensor's rows."""
    if isinstance(row, tf.Tensor):
        return tf.TensorSpec([count, *row.shape[1:]], row.dtype)
    if isinstance(row, tf.SparseTensor):
        return tf.SparseTensorSpec([None, *row.shape[1:]], row.dtype)
    return tf.RaggedTensorSpec([None, *row.shape[1:]], row.dtype, row.ragged_rank, row.row_splits.dtype)


def _shape_of(value: Any) -> Any:
    return tf.TensorShape([]) if isinstance(value, tf.TensorArray) else value.shape


def _join(array: tf.TensorArray, first: tf.Tensor) -> tf.Tensor:
    """Concatenates the rows of all slices in an array, whose first element is `first`."""
    inner = first.shape[1:]
    if not first.shape.is_fully_defined():
        return tf.ensure_shape(array.concat(), [None, *inner])
    return tf.reshape(array.stack(), [-1, *inner])
