"""`LayerCall`: a call of a layer as a function of rows, of tensors that all rows read, and of a state."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import (
    CallState,
    ReadScope,
    dense_parts,
    full_precision,
    has_gradient,
    mask_of,
    pack_dense_parts,
    with_mask,
)
from keras_paragrad.compat.private import get_stateless_scope
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.batches.replica_batch import rows_at
from keras_paragrad.engine.calls.divided import Result, spec_of_part
from keras_paragrad.engine.calls.intercept import not_intercepting
from keras_paragrad.engine.tracing.effects import find_unrepeatable
from keras_paragrad.engine.tracing.untouched import never_run, untouched
from keras_paragrad.storage.lookups import is_of_variables
from keras_paragrad.storage.row_gradients import is_overwritten
from keras_paragrad.storage.storage import storage_of


class RepeatableCall:
    """A call that can run again, with the same random numbers and no second effect.

    `name` is for errors. `once` says whether layers in the call may be recomputed themselves. `reason` says why a layer
    in the call can't assign to a weight, and what to do instead.
    """

    def __init__(
        self,
        call: Callable[..., Structure],
        name: str,
        arguments: tuple[Structure, ...],
        keywords: dict[str, Any],
        *,
        once: bool,
        reason: str,
    ):
        self._call, self.name, self._once, self._reason = call, name, once, reason
        self._structure = arguments, keywords
        self._call_state = CallState()
        # The leaves of the arguments, and their masks, which attention removes.
        self.leaves: list[Any] = keras.tree.flatten(self._structure)
        self.masks = [mask_of(leaf) for leaf in self.leaves]
        # The variables whose values are the state.
        self.assigned: list[keras.Variable] = []
        # Found by the last run: the nested outputs, the masks of their leaves, and which variables have changed.
        self._outputs: Structure = None
        self._output_masks: list[tf.Tensor | None] = []
        self._changed: list[bool] = []

    @property
    def state(self) -> list[tf.Tensor]:
        """The values of the variables that the call assigns."""
        return [load(stored) for stored, load in map(stored_value, self.assigned)]

    def run(
        self, leaves: list[Any], values: list[tuple[keras.Variable, tf.Tensor]], state: list[tf.Tensor]
    ) -> tuple[Result, ReadScope]:
        """Makes the call with these leaves of arguments, values of variables, and state.

        Returns:
            A result and the scope. The result has the outputs' tensors and then their masks as rows, the losses that
            layers add as sums, and the new state.
        """
        arguments, keywords = keras.tree.pack_sequence_as(self._structure, leaves)
        values = [*values, *zip(self.assigned, state, strict=True)]
        with self._call_state.entered(), ReadScope(self.name, values, self._reason, once=self._once) as scope:
            self._outputs = self._call(*arguments, **keywords)
        after = [scope.get_current_value(variable) for variable in self.assigned]
        self._changed = [one is not other for one, other in zip(after, state, strict=True)]
        outputs = keras.tree.flatten(self._outputs)
        self._output_masks = [mask_of(leaf) for leaf in outputs]
        masks = [mask for mask in self._output_masks if mask is not None]
        return Result(
            [part for leaf in outputs for part in dense_parts(leaf)] + masks, list(scope.losses), after
        ), scope

    def finish(self, result: Result) -> Structure:
        """Assigns the state of a result, and returns the nested outputs."""
        for variable, value, changed in zip(self.assigned, result.state, self._changed, strict=True):
            if changed:
                variable.assign(value)
        remaining, leaves = iter(result.rows), keras.tree.flatten(self._outputs)
        parts = [[next(remaining) for _ in dense_parts(leaf)] for leaf in leaves]
        masks = [None if mask is None else next(remaining) for mask in self._output_masks]
        return keras.tree.pack_sequence_as(self._outputs, pack_dense_parts(leaves, parts, masks))


def stored_value(variable: keras.Variable) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """A tensor to store for a variable, such as a shard. Also returns a function from it to what layers read."""
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    if value is not None:
        return tf.identity(tf.convert_to_tensor(value)), lambda tensor: tensor
    with full_precision():
        return storage_of(variable).recompute()


# The number of rows for which a call is traced to find its variables, where the batch's number isn't static.
_ROWS = 3
# The most traces of a call. Each finds the variables of one more level of nested layers.
_MOST_TRACES = 3


class LayerCall(RepeatableCall):
    """A call of a layer, as `function(rows, whole, state)`.

    `rows` are the tensors with as many rows as the first one, and their masks. `whole` are all other tensors, and the
    values of the variables that the call reads. `state` are the values of the variables that the call assigns.
    """

    def __init__(self, call: Callable[..., Structure], layer: keras.layers.Layer, arguments: Any, keywords: Any):
        reason = "its calls in parts of a batch must all read the same."
        super().__init__(call, layer.name, arguments, keywords, once=True, reason=reason)
        self.layer, self.leaves = layer, [_as_tensor(leaf) for leaf in self.leaves]
        sizes = [leaf.shape[0] for leaf in self.leaves if _is_tensor(leaf) and leaf.shape.rank]
        self.has_rows = bool(sizes)
        self.static = sizes[0] if sizes else None
        given = self._given
        by_row = [_is_tensor(leaf) and bool(leaf.shape.rank) and leaf.shape[0] == self.static for leaf in given]
        self._rowed = [index for index, rowed in enumerate(by_row) if rowed]
        self._others = [index for index, leaf in enumerate(given) if _is_tensor(leaf) and not by_row[index]]
        self.rows: list[Any] = [given[index] for index in self._rowed]
        self._read = list({id(variable): variable for variable in layer.variables}.values())

    @property
    def _given(self) -> list[Any]:
        return [*self.leaves, *self.masks]

    @property
    def whole(self) -> list[Any]:
        """The tensors that all parts of the call read."""
        given = self._given
        return [
            *(given[index] for index in self._others),
            *(load(stored) for stored, load in map(stored_value, self._read)),
        ]

    @property
    def read(self) -> set[int]:
        """The ids of the variables that the call reads."""
        return set(map(id, self._read))

    def __call__(self, rows: list[Any], whole: list[Any], state: list[Any]) -> Result:
        return self._run(rows, whole, state)[0]

    def _run(self, rows: list[Any], whole: list[Any], state: list[Any]) -> tuple[Result, ReadScope]:
        given = self._given
        for index, tensor in zip([*self._rowed, *self._others], [*rows, *whole[: len(self._others)]], strict=True):
            given[index] = tensor
        leaves, masks = given[: len(self.leaves)], given[len(self.leaves) :]
        # A mask is an attribute of a tensor: set it on a copy.
        leaves = [
            leaf if mask is None else with_mask(tf.identity(leaf), mask)
            for leaf, mask in zip(leaves, masks, strict=True)
        ]
        with not_intercepting():
            return self.run(leaves, list(zip(self._read, whole[len(self._others) :], strict=True)), state)

    def find_obstacle(self, *, runs_twice: bool) -> str | None:
        """Why the call can't be made in parts, or `None`. Also finds the variables that the call reads and assigns.

        `runs_twice` says whether parts are computed again in the backward pass.
        """
        composite = [leaf for leaf in self.leaves if _is_tensor(leaf) and not isinstance(leaf, tf.Tensor)]
        parts = [part for leaf in composite for part in dense_parts(leaf)]
        if any(has_gradient(part) and is_of_variables(part) for part in parts):
            return "it gets ragged or sparse numbers that may have a gradient"
        try:
            return self._trace(runs_twice)
        except Exception as error:
            # The layer is then called on all rows. If the layer itself fails, that call raises its error.
            return next(iter(str(error).strip().splitlines()), type(error).__name__)

    def _trace(self, runs_twice: bool) -> str | None:
        count = (self.static or _ROWS) if not tf.executing_eagerly() else min(self.static or _ROWS, _ROWS)
        runs = list[tuple[Result, ReadScope]]()
        specs = [spec_of_part(row, count) for row in self.rows]
        hidden: str | None = None

        def trace(rows: list[Any], whole: list[Any]) -> None:
            runs.append(self._run(rows, whole, []))

        missing: dict[int, keras.Variable] = {}
        result, scope = None, None
        for _ in range(_MOST_TRACES):
            self._read = [*self._read, *missing.values()]
            whole = [tf.TensorSpec(value.shape, value.dtype) for value in self.whole]
            with untouched(self.layer, never_run()):
                if tf.executing_eagerly():
                    hidden = _hidden_eagerly(functools.partial(trace, rows_at(self.rows, 0, count), self.whole), runs)
                else:
                    traced = tf.function(trace, autograph=False).get_concrete_function(specs, whole)
                    found = find_unrepeatable(traced.graph.get_operations(), but_random=not runs_twice)
                    hidden = (
                        found and f"its operation {found.operation.name!r} ({found.operation.type}) {found.problem}"
                    )
            result, scope = runs[-1]
            missing = scope.missing
            if not missing:
                break
        assert result is not None
        assert scope is not None
        if missing:
            return f"it reads {next(iter(missing.values())).path!r}, which is of no layer in it"
        assigned = [variable for variable, _ in scope.updates]
        read, ids = self._read, {id(variable) for variable in assigned}
        self._read = [variable for variable in read if id(variable) not in ids]
        self.assigned = [variable for variable in read if id(variable) in ids]
        return _obstacle(result, assigned, self._read, count) or hidden


def _obstacle(result: Result, assigned: list[keras.Variable], read: list[keras.Variable], count: int) -> str | None:
    if result.sums:
        return "it adds a loss, which may be of all rows"
    if any(variable.aggregation == "sum" for variable in assigned):
        return "it updates a metric"
    if any(map(is_overwritten, read)):
        return "it keeps the scales of float8"
    for output in result.rows:
        if not isinstance(output, tf.Tensor) or not output.shape.rank or output.shape[0] != count:
            return f"it returns a tensor of shape {output.shape} for {count} rows"
    return None


def _hidden_eagerly(run: Callable[[], None], runs: list[tuple[Result, ReadScope]]) -> str | None:
    """Why a call can't be repeated, or `None`. Runs it twice in eager mode, where no graph shows its operations."""
    with tf.GradientTape() as tape:
        run()
    run()
    if variables := tape.watched_variables():
        return f"it uses {variables[0].name!r}, a tf.Variable that Keras does not know"
    pairs = zip(runs[-2][0].rows, runs[-1][0].rows, strict=True)
    if not all(np.array_equal(one, other, equal_nan=one.dtype.is_floating) for one, other in pairs):
        return "it draws random numbers, and would draw others when it runs again"
    return None


def _is_tensor(leaf: object) -> bool:
    return tf.is_tensor(leaf) and not isinstance(leaf, (keras.Variable, tf.Variable))


def _as_tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else leaf
