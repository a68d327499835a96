"""Runs functions again in the backward pass, and stores no activations: `divided` with a single part."""

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
    """A function of tensors that runs again in the backward pass. Of nested ones, only the outermost does.

    The function calls `layers`, whose added losses go to `owner`. `name` is for errors.
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
        """The variables of the layers. A shared variable is in the list several times."""
        return [variable for layer in self.layers for variable in layer.variables]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((arguments, keywords)))
        if symbolic or tf.executing_eagerly() or in_other_scope() or not may_be_differentiated():
            return self.function(*arguments, **keywords)
        call = _RecomputedCall(self, arguments, keywords, self.variables)
        if not any(map(has_gradient, [*call.tensors, *call.stored])):
            return self.function(*arguments, **keywords)
        # Where the data may have ended, counters of optimizers have to wait until the batch is known to exist.
        count_after(call.tensors)
        result = call.divided()
        if call.missing:
            # The function also reads variables outside of its layers, such as the global seed.
            call = _RecomputedCall(self, arguments, keywords, [*self.variables, *call.missing])
            result = call.divided()
        # TensorFlow's registry would keep the gradient function, and so the graph, forever.
        keep_with_graphs([tf.compat.v1.get_default_graph()])
        for loss in result.sums:
            # Not `owner.add_loss`: a Functional model refuses it.
            keras.layers.Layer.add_loss(self.owner, loss)
        return call.finish(result)


class _RecomputedCall(RepeatableCall):
    """A call as a function of tensors in arguments (rows), weights (whole), other variables (state)."""

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
        # Variables outside of `variables` that the last run has read.
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
    """Computes all rows in a single part. The second run waits for the cotangents.

    The rows of the second run are `tensors` inputs, and then cotangents. For each weight, `loads` has a function from
    the stored tensor to the value. Both runs call it, so shards are gathered in each run, and not all at once before
    the step. A stored tensor gets the gradient of the value.
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
    """Context that yields a list. At its end, the list gets the operations that this replica has created."""
    graph = tf.compat.v1.get_default_graph()
    start, created = len(graph.get_operations()), []
    with tf.name_scope("recomputed") as scope:
        yield created
    created += [operation for operation in graph.get_operations()[start:] if operation.name.startswith(scope)]


@contextlib.contextmanager
def _after(cotangents: Sequence[tf.Tensor]) -> Generator[Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]]:
    """Context whose operations wait for cotangents. Yields a function that makes tensors wait under XLA too.

    XLA ignores control dependencies, and would merge the second run with the first. So the second run subtracts a zero
    that depends on the cotangents: XLA can't merge what differs. An optimization barrier has no effect on CPUs.
    """
    with tf.control_dependencies(cotangents):
        # No cotangent is above infinity, so this is zero.
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
    """Makes a layer's calls run again in the backward pass. Returns a function that undoes that."""
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
