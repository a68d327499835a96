"""Frees gathered weights after the forward pass: the backward pass reads weights that are gathered again.

The *position* of an operation is its index in the graph; from `backward_start` on, it belongs to the backward pass.
"""

import contextlib
import threading
from collections.abc import Generator
from typing import Any, NamedTuple

import tensorflow as tf

from keras_paragrad.compat.operations import SAME_BUFFER
from keras_paragrad.compat.types import DType, TensorVariable

# Operations whose output shares the weight's buffer, or is as large as the weight and computed from it alone.
_VIEWS = SAME_BUFFER | {"Cast", "Transpose"}
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Operations that run at once, and keep no input.
_SHAPE_OPERATIONS = ("Rank", "Shape", "ShapeN", "Size")


class _Gather(NamedTuple):
    """A weight that was gathered in a dtype."""

    variable: TensorVariable
    dtype: DType | None
    tensor: tf.Tensor


class _Gathered(threading.local):
    """The weights that this replica has gathered."""

    def __init__(self) -> None:
        self.weights: list[_Gather] = []


_GATHERED = _Gathered()


def record_gather(variable: TensorVariable, dtype: DType | None, tensor: tf.Tensor) -> None:
    """Records that this replica has gathered a weight."""
    if not tf.executing_eagerly():
        _GATHERED.weights.append(_Gather(variable, dtype, tensor))


def forget_gathers() -> None:
    """Forgets the weights that this replica has gathered, for a step whose backward pass reuses them."""
    _GATHERED.weights = []


@contextlib.contextmanager
def regather_in_backward(loss: tf.Tensor) -> Generator[None]:
    """Context of `tape.gradient` that gathers weights again for the backward pass.

    A weight is gathered when the first gradient arrives that needs it, or else when the loss is there. So the tensor
    of the forward pass is freed at its last use, and not kept until the backward pass.
    """
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    gathered = [weight for weight in _GATHERED.weights if weight.tensor.graph is graph]
    _GATHERED.weights = []
    if not gathered:
        yield
        return
    backward_start = len(graph.get_operations())
    yield
    operations = graph.get_operations()
    positions = {operation.name: position for position, operation in enumerate(operations)}
    weights = [_Weight(weight, backward_start, positions) for weight in gathered]
    # Collectives run in the order in which they are traced. A weight that is used before collectives of the backward
    # pass, as of a synchronized BatchNormalization, would be gathered after them, and they may need it: it is kept.
    last = max((index for index, each in enumerate(operations) if each.type.startswith("Collective")), default=-1)
    # In the order in which the backward pass uses them, the same on every replica.
    after = [loss]
    for weight in sorted((each for each in weights if each.first_use > last), key=lambda weight: weight.first_use):
        after = weight.regather(after)
    _GATHERED.weights = []


class _Weight:
    """A gathered weight, and the backward pass's uses of it and of its views, which operations in `_VIEWS` make."""

    def __init__(self, gathered: _Gather, backward_start: int, positions: dict[str, int]):
        self._variable, self._dtype, self._tensor = gathered
        self._backward_start, self._positions = backward_start, positions
        # The regathered counterparts of views, by `id`.
        self._regathered: dict[int, tf.Tensor] = {}
        # Keeps the tensors alive, whose `id`s are keys.
        self._views = self._views_of(self._tensor)
        self.uses = [
            (use, view)
            for view in self._views
            for use in view.consumers()
            if self._is_backward(use) and use.type not in _SHAPE_OPERATIONS
        ]
        self.first_use = min((positions[use.name] for use, _ in self.uses), default=-1)

    def regather(self, after: list[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers the weight again, and rewires the backward pass to it.

        It waits for inputs of its first use, which do not depend on it, or for what the weight before waited for, and
        returns these.
        """
        first = next(use for use, _ in self.uses if self._positions[use.name] == self.first_use)
        after = [input_ for input_ in first.inputs if self._is_backward(input_.op)] or after
        self._regathered[id(self._tensor)] = self._variable.gathered(self._dtype, after)
        for use, view in self.uses:
            for index, input_ in enumerate(use.inputs):
                if input_ is view:
                    use._update_input(index, self._counterpart(view))
        return after

    def _is_backward(self, operation: tf.Operation) -> bool:
        # Operations that gather another weight again have no position.
        return self._positions.get(operation.name, -1) >= self._backward_start

    def _views_of(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        views = [tensor]
        for use in tensor.consumers():
            if self._is_backward(use):
                continue
            if use.type in _CALLS:
                views += [view for output in _outputs_viewing(use, tensor) for view in self._views_of(output)]
            elif use.type in _VIEWS and all(input_ is tensor or input_.op.type == "Const" for input_ in use.inputs):
                views += [view for output in use.outputs for view in self._views_of(output)]
        return views

    def _counterpart(self, view: tf.Tensor) -> tf.Tensor:
        """A view of the regathered weight; copies the operations that made the view."""
        if id(view) in self._regathered:
            return self._regathered[id(view)]
        operation, graph = view.op, self._tensor.graph
        if operation.type in _CALLS:
            body = _body(operation)
            inner = body.outputs[view.value_index]
            pairs = zip(operation.inputs, body.inputs, strict=True)
            argument = next(outer for outer, parameter in pairs if _origin(inner) is parameter)
            self._regathered[id(_origin(inner))] = self._counterpart(argument)
            self._regathered[id(view)] = self._counterpart(inner)
            return self._regathered[id(view)]
        # A constant inside a function is copied to the graph.
        inputs = [
            input_ if input_.op.type == "Const" and input_.graph is graph else self._counterpart(input_)
            for input_ in operation.inputs
        ]
        copy = graph.create_op(
            operation.type,
            inputs,
            [output.dtype for output in operation.outputs],
            attrs=dict(operation.node_def.attr),
            op_def=operation.op_def,
        )
        self._regathered.update((id(old), new) for old, new in zip(operation.outputs, copy.outputs, strict=True))
        return self._regathered[id(view)]


def _body(call: tf.Operation) -> tf.Graph:
    """The graph of the function that an operation calls."""
    return call.graph._get_function(call.get_attr("f").name).graph


def _outputs_viewing(call: tf.Operation, tensor: tf.Tensor) -> list[tf.Tensor]:
    """The outputs of a call that are views of an input: a function returns the tensors its backward pass reads."""
    body = _body(call)
    parameters = {id(inner) for outer, inner in zip(call.inputs, body.inputs, strict=True) if outer is tensor}
    pairs = zip(call.outputs, body.outputs, strict=True)
    return [outer for outer, inner in pairs if id(_origin(inner)) in parameters]


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that a tensor is a view of."""
    operation = tensor.op
    inputs = [input_ for input_ in operation.inputs if input_.op.type != "Const"]
    return _origin(inputs[0]) if operation.type in _VIEWS and len(inputs) == 1 else tensor
