"""Lets go of gathered weights after the forward pass: what the backward pass reads is gathered again."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

# What keeps a weight's buffer, or is as large as the weight, and is computed from it alone.
_VIEWS = ("Cast", "ExpandDims", "Identity", "IdentityN", "Reshape", "Squeeze", "Transpose")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# These run at once, and keep nothing.
_OF_SHAPE = ("Rank", "Shape", "ShapeN", "Size")
_TOKEN, _OTHER = CollectiveReplicaLauncher._get_ordering_token, "_keras_paragrad_token"


class _Gathered(threading.local):
    """The gathered weights that this replica has read: their storage, the dtype they were gathered in, the tensor."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, Any, tf.Tensor]] = []


_GATHERED = _Gathered()


def note(storage: Any, dtype: Any, tensor: tf.Tensor) -> None:
    """Notes that this replica has gathered a weight."""
    if not tf.executing_eagerly():
        _GATHERED.found.append((storage, dtype, tensor))


@contextlib.contextmanager
def regather_in_backward(loss: tf.Tensor) -> Iterator[None]:
    """Context of `tape.gradient`: what it makes of gathered weights is given weights that are gathered once more.

    Each is gathered when the first gradient arrives that needs it. Then the forward pass's is freed at its last use,
    where it would be kept from the forward to the backward pass.

    Args:
        loss: The loss, for which a weight waits that no gradient has to arrive for.
    """
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    gathered = [each for each in _GATHERED.found if each[2].graph is graph]
    _GATHERED.found = []
    if not gathered:
        yield
        return
    before = len(graph.get_operations())
    yield
    operations = graph.get_operations()
    places = {operation.name: place for place, operation in enumerate(operations)}
    collectives = [(place, each) for place, each in enumerate(operations) if place >= before and _is_collective(each)]
    rewired = [_Weight(each, before, places, collectives) for each in gathered]
    # In the order in which the backward pass comes to them, the same on every replica.
    after = [loss]
    for weight in sorted((each for each in rewired if each.uses), key=lambda each: each.first):
        after = weight.rewire(after)
    _GATHERED.found = []


class _Weight:
    """A gathered weight, and the operations of the backward pass that use it or a view of it."""

    def __init__(self, gathered: Any, before: int, places: dict[str, int], collectives: list[tuple[int, Any]]):
        self._storage, self._dtype, self._tensor = gathered
        self._before, self._places, self._collectives = before, places, collectives
        self._again: dict[int, tf.Tensor] = {}
        # Views keep tensors alive by whose `id` they are known.
        self._views = self._views_of(self._tensor)
        self.uses = [
            (use, view)
            for view in self._views
            for use in view.consumers()
            if self._is_backward(use) and use.type not in _OF_SHAPE
        ]
        self.first = min((places[use.name] for use, _ in self.uses), default=-1)

    def rewire(self, after: list[tf.Tensor]) -> list[tf.Tensor]:
        """Has the backward pass use the weight gathered again.

        Args:
            after: What an earlier one waited for.

        Returns:
            What this one waits for: nothing that depends on it, as it comes before the first use.
        """
        first = next(use for use, _ in self.uses if self._places[use.name] == self.first)
        after = [each for each in first.inputs if self._is_backward(each.op)] or after
        self._again[id(self._tensor)] = self._gathered(after)
        for use, view in self.uses:
            for index, each in enumerate(use.inputs):
                if each is view:
                    use._update_input(index, self._made_again(view))
        return after

    def _gathered(self, after: list[tf.Tensor]) -> tf.Tensor:
        if all(place < self.first for place, _ in self._collectives):
            return self._storage.gathered(self._dtype, after)
        # Of a synchronized BatchNormalization, whose gradients may need this weight's. Workers run collectives in the
        # order in which they were made, by a token that they pass on, and this one is made last and has to run first.
        with _in_an_order_of_their_own():
            tensor = self._storage.gathered(self._dtype, after)
        for own in self._made_for(tensor):
            for place, other in self._collectives:
                if other.device == own.device:
                    first, then = (other, own) if place < self.first else (own, other)
                    then._add_control_input(first)
        return tensor

    def _made_for(self, tensor: tf.Tensor) -> list[Any]:
        """The collectives that a tensor was gathered by."""
        found, waiting = {}, [tensor.op]
        while waiting:
            each = waiting.pop()
            if each.name not in self._places and each.name not in found:
                found[each.name] = each
                waiting += [given.op for given in each.inputs]
        return [each for each in found.values() if _is_collective(each)]

    def _is_backward(self, operation: Any) -> bool:
        # What was gathered again for another weight has no place.
        return self._places.get(operation.name, -1) >= self._before

    def _views_of(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        found = [tensor]
        for use in tensor.consumers():
            if self._is_backward(use):
                continue
            if use.type in _CALLS:
                found += [view for output in _returned(use, tensor) for view in self._views_of(output)]
            elif use.type in _VIEWS and all(each is tensor or each.op.type == "Const" for each in use.inputs):
                found += [view for output in use.outputs for view in self._views_of(output)]
        return found

    def _made_again(self, view: Any) -> tf.Tensor:
        if id(view) not in self._again:
            made, graph = view.op, self._tensor.graph
            if made.type in _CALLS:
                body = _body(made)
                kept = body.outputs[view.value_index]
                given = next(
                    outer for outer, inner in zip(made.inputs, body.inputs, strict=True) if _origin(kept) is inner
                )
                self._again[id(_origin(kept))] = self._made_again(given)
                self._again[id(view)] = self._made_again(kept)
                return self._again[id(view)]
            # A constant of a function's is made once more, outside of it.
            inputs = [
                each if each.op.type == "Const" and each.graph is graph else self._made_again(each)
                for each in made.inputs
            ]
            copy = graph.create_op(
                made.type,
                inputs,
                [each.dtype for each in made.outputs],
                attrs=dict(made.node_def.attr),
                op_def=made.op_def,
            )
            self._again.update((id(old), new) for old, new in zip(made.outputs, copy.outputs, strict=True))
        return self._again[id(view)]


def _is_collective(operation: Any) -> bool:
    return operation.type.startswith("Collective")


@contextlib.contextmanager
def _in_an_order_of_their_own() -> Iterator[None]:
    """Context in which collectives don't wait for those that were made before outside of one."""
    CollectiveReplicaLauncher._get_ordering_token = _other_token
    try:
        yield
    finally:
        CollectiveReplicaLauncher._get_ordering_token = _TOKEN


def _other_token(launcher: Any) -> tf.Tensor:
    if not hasattr(launcher, _OTHER):
        with tf.init_scope(), tf.device(launcher._device):
            setattr(launcher, _OTHER, ResourceVariable(0.0))
    return getattr(launcher, _OTHER).handle


def _body(call: Any) -> Any:
    """The graph of the function that an operation calls."""
    return call.graph._get_function(call.get_attr("f").name).graph


def _returned(call: Any, tensor: Any) -> list[Any]:
    """The outputs of a call that are a view of one of its inputs: what is kept for its backward pass."""
    body = _body(call)
    inside = {id(inner) for outer, inner in zip(call.inputs, body.inputs, strict=True) if outer is tensor}
    pairs = zip(call.outputs, body.outputs, strict=True)
    return [outer for outer, inner in pairs if id(_origin(inner)) in inside]


def _origin(tensor: Any) -> Any:
    """What a tensor is a view of."""
    made = tensor.op
    others = [each for each in made.inputs if each.op.type != "Const"]
    return _origin(others[0]) if made.type in _VIEWS and len(others) == 1 else tensor
