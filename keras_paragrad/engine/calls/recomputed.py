"""Functions that run again in the backward pass, instead of storing their activations: `divided`, in a single part."""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.compiled_call import call_compiled
from keras_paragrad.compat.layers import (
    dense_parts,
    has_gradient,
    in_other_scope,
    may_be_differentiated,
    pack_dense_parts,
)
from keras_paragrad.compat.model import count_after
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.calls.divided import Function, Result, divided
from keras_paragrad.engine.calls.layer_call import RepeatableCall, stored_value
from keras_paragrad.engine.tracing.effects import check_repeatable
from keras_paragrad.engine.tracing.gradient_functions import keep_with_graphs
from keras_paragrad.storage.gathering import call_with_gather, install_gather


class Recomputed:
    """A function of tensors that runs again in the backward pass; if nested, only the outermost does.

    It calls `layers`; losses that these layers add are added to `owner`. Errors call it `name`.
    """

    def __init__(
        self,
        function: Callable[..., Structure],
        name: str,
        layers: Sequence[keras.layers.Layer],
        owner: keras.layers.Layer,
    ):
        functools.update_wrapper(self, function)
        self.function, self.name, self.layers, self.owner = function, name, layers, owner

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the layers; a shared variable is in the list several times."""
        return [variable for layer in self.layers for variable in layer.variables]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((arguments, keywords)))
        if symbolic or tf.executing_eagerly() or in_other_scope() or not may_be_differentiated():
            return self.function(*arguments, **keywords)
        call = _RecomputedCall(self, arguments, keywords, self.variables)
        if not any(map(has_gradient, [*call.tensors, *call.stored])):
            return self.function(*arguments, **keywords)
        # On data of unknown length, the optimizer would count a batch that turns out not to exist.
        count_after(call.tensors)
        result = call.divided()
        if call.missing:
            # It also reads variables outside of its layers, such as the global seed.
            call = _RecomputedCall(self, arguments, keywords, [*self.variables, *call.missing])
            result = call.divided()
        # TensorFlow's registry would keep the gradient function, and so the graph, forever.
        keep_with_graphs([tf.compat.v1.get_default_graph()])
        for loss in result.sums:
            # Not `owner.add_loss`: a Functional model refuses it.
            keras.layers.Layer.add_loss(self.owner, loss)
        return call.finish(result)


class _RecomputedCall(RepeatableCall):
    """A call as a function of the tensors in its arguments, of its weights, and of its other variables as the state."""

    def __init__(
        self,
        recomputed: Recomputed,
        arguments: tuple[Structure, ...],
        keywords: dict[str, Any],
        variables: Sequence[keras.Variable],
    ):
        reason = "a second run can't compute the gradient of an assignment. Leave it out of `layers`."
        super().__init__(recomputed.function, recomputed.name, arguments, keywords, once=False, reason=reason)
        self.recomputed = recomputed
        self.tensors = [part for leaf in self.leaves for part in dense_parts(leaf)]
        unique = list({id(variable): variable for variable in variables}.values())
        self._weights = [variable for variable in unique if variable.trainable]
        self.assigned = [variable for variable in unique if not variable.trainable]
        pairs = [stored_value(variable) for variable in self._weights]
        self.stored, self._loads = [tensor for tensor, _ in pairs], [load for _, load in pairs]
        # Variables that the last run has read, and that aren't among `variables`.
        self.missing: list[keras.Variable] = []
        self._scope: str | None = None

    def divided(self) -> Result:
        """The result of the first run, with the gradient of the second."""
        state = self.state
        with _recording_operations() as operations:
            result = divided(self, self.tensors, self.stored, _OnePart(len(self.tensors), self._loads), state)
        if not self.missing:
            check_repeatable(self.name, operations)
        # Profiles recognize recomputed layers by this scope.
        self._scope = "/".join(["second_run", *filter(None, [tf.compat.v1.get_default_graph().get_name_scope()])])
        return result

    def __call__(self, rows: list[Any], whole: list[Any], state: list[Any]) -> Result:
        remaining = iter(rows)
        parts = [[next(remaining) for _ in dense_parts(leaf)] for leaf in self.leaves]
        count = len(self.recomputed.variables)
        leaves = pack_dense_parts(self.leaves, parts, self.masks)
        with tf.name_scope(self._scope) if self._scope else contextlib.nullcontext():
            result, scope = self.run(leaves, list(zip(self._weights, whole, strict=True)), state)
        self.missing = list(scope.missing.values())
        if len(self.recomputed.variables) != count:
            raise ValueError(
                f"{self.name!r} created variables while it was traced, so it can't run a second time. Build the model "
                "first: call it once on a batch, as in model(x)."
            )
        return result


class _OnePart(NamedTuple):
    """All rows in a single part, whose gradient waits for the cotangents, which follow the `tensors` among the rows.

    `loads` has for each weight a function from the tensor that is stored for it to its value. Each run calls it, so
    shards are gathered in that run, and not all at once before the step. A stored tensor has the gradient of its value.
    """

    tensors: int
    loads: Sequence[Callable[[tf.Tensor], tf.Tensor]]

    def run(
        self, function: Function, rows: list[Any], whole: list[Any], state: list[Any], before: Any
    ) -> tuple[Result, Any]:
        stored, others = whole[: len(self.loads)], whole[len(self.loads) :]
        if before is None:
            with tf.control_dependencies([row for row in rows if has_gradient(row)]):
                weights = self._load(stored)
            return call_compiled(function, rows, weights, state), state
        inputs, cotangents = rows[: self.tensors], rows[self.tensors :]
        with _after([*cotangents, *others]) as later:
            weights = [tf.identity(weight) for weight in self._load(stored)]
            given = [*later(inputs), *cotangents], [*weights, *others], later(before)
            return call_compiled(function, *given), before

    def _load(self, stored: list[tf.Tensor]) -> list[tf.Tensor]:
        return [load(tensor) for load, tensor in zip(self.loads, stored, strict=True)]


@contextlib.contextmanager
def _recording_operations() -> Generator[list[tf.Operation]]:
    """Context that yields a list, and at its end fills it with the operations that this replica has created."""
    graph = tf.compat.v1.get_default_graph()
    start, created = len(graph.get_operations()), []
    with tf.name_scope("recomputed") as scope:
        yield created
    created += [operation for operation in graph.get_operations()[start:] if operation.name.startswith(scope)]


@contextlib.contextmanager
def _after(cotangents: Sequence[tf.Tensor]) -> Generator[Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]]:
    """Context whose operations wait for the cotangents; yields a function that makes tensors wait under XLA too.

    XLA ignores control dependencies, and would merge the second run with the first. It can't merge computations of
    different numbers. An optimization barrier has no effect on CPUs.
    """
    with tf.control_dependencies(cotangents):
        # Zero for any cotangents.
        flat = [tf.math.real(tf.reshape(cotangent, [-1])[:1]) for cotangent in cotangents]
        first = [tf.cast(tf.reduce_max(value), "float32") for value in flat]
        zero = tf.add_n([tf.cast(value > float("inf"), "float32") for value in first])

        def later(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            numeric = [tensor.dtype.is_floating or tensor.dtype.is_integer for tensor in tensors]
            return [
                tensor - tf.cast(zero, tensor.dtype) if is_numeric else tf.identity(tensor)
                for tensor, is_numeric in zip(tensors, numeric, strict=True)
            ]

        yield later


def is_recomputed(layer: keras.layers.Layer) -> bool:
    """Whether the layer's calls run again in the backward pass."""
    return isinstance(vars(layer).get("call"), Recomputed)


def recompute_layer(layer: keras.layers.Layer) -> Callable[[], None]:
    """Makes the calls of a layer run again in the backward pass, and returns a function that undoes it."""
    # Bypass Keras's tracking: a method is not state of the layer.
    attributes = vars(layer)
    before = {"call": attributes["call"]} if "call" in attributes else {}
    call = attributes.get("call") or functools.partial(call_with_gather, layer)
    recomputed = functools.update_wrapper(Recomputed(call, layer.name, [layer], layer), layer.call)
    attributes["call"] = recomputed

    def undo() -> None:
        if attributes.get("call") is recomputed:
            del attributes["call"]
            attributes.update(before)
            install_gather(layer)

    return undo
