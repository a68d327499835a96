"""Functions that run again in the backward pass, instead of storing their activations.

A function is a `tf.custom_gradient` of all that it reads: its tensors, its weights, and the state from before the call.
So the second run draws the same random numbers and changes nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Self

import keras
import tensorflow as tf

from keras_paragrad.compat.compiled_call import call_compiled
from keras_paragrad.compat.layers import (
    CallState,
    ReadScope,
    dense_parts,
    full_precision,
    has_gradient,
    in_other_scope,
    mask_of,
    may_be_differentiated,
    pack_dense_parts,
)
from keras_paragrad.compat.model import count_after
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.step.operations import check_repeatable
from keras_paragrad.engine.tracing.gradient_functions import keep_with_graphs
from keras_paragrad.storage.gathering import call_with_gather, install_gather
from keras_paragrad.storage.storage import storage_of

_ASSIGNS_TO_WEIGHT = "a second run can't compute the gradient of an assignment. Leave it out of `layers`."


class _Captured(NamedTuple):
    """The variables that a function reads.

    Attributes:
        loads: For each weight, maps its stored tensor to its value in a run.
        stored: Tensors stored between the runs, such as shards; gradients are taken with respect to them.
        state, before: The other variables, and their values before the call.
    """

    weights: list[keras.Variable]
    loads: list[Callable[[tf.Tensor], tf.Tensor]]
    stored: list[tf.Tensor]
    state: list[keras.Variable]
    before: list[tf.Tensor]

    @classmethod
    def of(cls, variables: Sequence[keras.Variable]) -> Self:
        """Captures variables with their present values; a variable may be given several times."""
        unique = list({id(variable): variable for variable in variables}.values())
        weights = [variable for variable in unique if variable.trainable]
        state = [variable for variable in unique if not variable.trainable]
        with full_precision():
            before = [tf.identity(tf.convert_to_tensor(variable.value)) for variable in state]
            recomputed = [storage_of(variable).recompute() for variable in weights]
            return cls(weights, [load for _, load in recomputed], [tensor for tensor, _ in recomputed], state, before)

    def load(self, stored: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The weights as layers read them, made in each of the two runs."""
        return [load(tensor) for load, tensor in zip(self.loads, stored, strict=True)]


class _Function(NamedTuple):
    """A function that calls layers, with its name in errors."""

    call: Callable[..., Structure]
    name: str
    layers: Sequence[keras.layers.Layer]

    @property
    def variables(self) -> list[keras.Variable]:
        return [variable for layer in self.layers for variable in layer.variables]


class _Run:
    """One call of a function: its two runs, and its effects."""

    def __init__(
        self,
        function: _Function,
        arguments: tuple[Structure, ...],
        keywords: dict[str, Any],
        variables: Sequence[keras.Variable],
    ):
        self.function, self.structure = function, (arguments, keywords)
        self.captured = _Captured.of(variables)
        self.call_state = CallState()
        self.leaves = keras.tree.flatten(self.structure)
        self.masks = [mask_of(leaf) for leaf in self.leaves]
        self.tensors = [part for leaf in self.leaves for part in dense_parts(leaf)]
        self.indices = [index for index, tensor in enumerate(self.tensors) if has_gradient(tensor)]
        # The name scope of the second run.
        self.scope = "/".join(["second_run", *filter(None, [tf.compat.v1.get_default_graph().get_name_scope()])])
        # Found by the first run; `missing` are variables that it reads, and that aren't among `variables`.
        self.result: Structure = None
        self.missing: list[keras.Variable] = []
        self.losses: list[tf.Tensor] = []
        self.updated: list[keras.Variable] = []
        self.updates: list[tuple[keras.Variable, tf.Tensor]] = []

    @property
    def differentiable(self) -> list[tf.Tensor]:
        """The tensors with respect to which gradients are taken."""
        return [*(self.tensors[index] for index in self.indices), *self.captured.stored]

    def __call__(self) -> Structure:
        """Runs the function for the first time, and returns its outputs."""
        first_results: list[Any] = []

        @tf.custom_gradient
        def recomputed(*tensors: tf.Tensor):
            with _recording_operations() as operations:
                with tf.control_dependencies(tensors[: len(self.indices)]):
                    # Shards are gathered here, not all at once before the step.
                    weights = self.captured.load(tensors[len(self.indices) :])
                parts, masks, losses, values = call_compiled(
                    self._first, self._with_inputs(tensors), weights, self.captured.before
                )
            if not self.missing:
                check_repeatable(self.function.name, operations)
            first_results[:] = [parts, masks, values]
            return [part for leaf in parts for part in leaf if has_gradient(part)] + losses, self._gradient(tensors)

        returned: Any = recomputed(*self.differentiable)
        parts, masks, values = first_results
        remaining = iter(returned)
        parts = [[next(remaining) if has_gradient(part) else part for part in leaf] for leaf in parts]
        self.losses = list(remaining)
        self.updates = list(zip(self.updated, values, strict=True))
        return keras.tree.pack_sequence_as(self.result, pack_dense_parts(keras.tree.flatten(self.result), parts, masks))

    def _first(
        self, tensors: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor]
    ) -> tuple[list[list[tf.Tensor]], list[tf.Tensor | None], list[tf.Tensor], list[tf.Tensor]]:
        """The first run. XLA may compile it, so it returns only tensors."""
        self.result, scope = self._call(tensors, weights, state)
        self.missing = list(scope.missing.values())
        self.updated = [variable for variable, _ in scope.updates]
        flat = keras.tree.flatten(self.result)
        values = [value for _, value in scope.updates]
        return [dense_parts(leaf) for leaf in flat], [mask_of(leaf) for leaf in flat], scope.losses, values

    def _gradient(self, tensors: Sequence[tf.Tensor]) -> Callable[..., list[tf.Tensor | None]]:
        """The gradient function, which runs the function a second time."""

        def second(
            tensors: Sequence[tf.Tensor],
            weights: Sequence[tf.Tensor],
            state: Sequence[tf.Tensor],
            cotangents: list[tf.Tensor],
        ) -> Any:
            sources = [*(tensors[index] for index in self.indices), *weights]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                # Profiles recognize recomputed layers by this scope.
                with tf.name_scope(self.scope):
                    result, scope = self._call(tensors, weights, state)
                parts = [part for leaf in keras.tree.flatten(result) for part in dense_parts(leaf)]
                targets = [part for part in parts if has_gradient(part)] + list(scope.losses)
            # `None` for weights without a gradient, which an optimizer doesn't update.
            return tape.gradient(targets, sources, cotangents)

        def gradient(*cotangents: Any, variables: Sequence[tf.Variable] | None = None) -> list[tf.Tensor | None]:
            assert not variables, "operations that read variables are refused"
            with self.call_state.entered(), _after(cotangents) as later:
                weights = [tf.identity(weight) for weight in self.captured.load(tensors[len(self.indices) :])]
                gradients = call_compiled(
                    second, later(self._with_inputs(tensors)), weights, later(self.captured.before), list(cotangents)
                )
            # A gathered weight may have another dtype than its shards.
            return [
                value if value is None else tf.cast(value, tensor.dtype)
                for value, tensor in zip(gradients, tensors, strict=True)
            ]

        return gradient

    def _with_inputs(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors of the arguments, with the differentiable ones replaced."""
        replaced = list(self.tensors)
        for index, tensor in zip(self.indices, tensors, strict=False):
            replaced[index] = tensor
        return replaced

    def _call(
        self, tensors: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor]
    ) -> tuple[Structure, ReadScope]:
        """Calls the function on these tensors in place of its arguments, and of the values of its variables."""
        remaining = iter(tensors)
        parts = [[next(remaining) for _ in dense_parts(leaf)] for leaf in self.leaves]
        arguments, keywords = keras.tree.pack_sequence_as(
            self.structure, pack_dense_parts(self.leaves, parts, self.masks)
        )
        count = len(self.function.variables)
        values = [*zip(self.captured.weights, weights, strict=True), *zip(self.captured.state, state, strict=True)]
        with ReadScope(self.function.name, values, _ASSIGNS_TO_WEIGHT) as scope:
            result = self.function.call(*arguments, **keywords)
        if len(self.function.variables) != count:
            raise ValueError(
                f"{self.function.name!r} created variables while it was traced, so it can't run a second time. Build "
                "the model first: call it once on a batch, as in model(x)."
            )
        return result, scope


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
        self.function, self.owner = _Function(function, name, layers), owner

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((arguments, keywords)))
        if symbolic or tf.executing_eagerly() or in_other_scope() or not may_be_differentiated():
            return self.function.call(*arguments, **keywords)
        run = _Run(self.function, arguments, keywords, self.function.variables)
        if not run.differentiable:
            return self.function.call(*arguments, **keywords)
        # On data of unknown length, the optimizer would count a batch that turns out not to exist.
        count_after(run.tensors)
        outputs = run()
        if run.missing:
            # It also reads variables outside of its layers, such as the global seed.
            run = _Run(self.function, arguments, keywords, [*self.function.variables, *run.missing])
            outputs = run()
        # TensorFlow's registry would keep the gradient function, and so the graph, forever.
        keep_with_graphs([tf.compat.v1.get_default_graph()])
        for loss in run.losses:
            # Not `owner.add_loss`: a Functional model refuses it.
            keras.layers.Layer.add_loss(self.owner, loss)
        for variable, value in run.updates:
            variable.assign(value)
        return outputs


@contextlib.contextmanager
def _recording_operations() -> Generator[list[tf.Operation]]:
    """Context that yields a list, and at its end fills it with the operations that this replica has created."""
    graph = tf.compat.v1.get_default_graph()
    start, created = len(graph.get_operations()), []
    with tf.name_scope("recomputed") as scope:
        yield created
    created += [operation for operation in graph.get_operations()[start:] if operation.name.startswith(scope)]


@contextlib.contextmanager
def _after(cotangents: Sequence[tf.Tensor | None]) -> Generator[Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]]:
    """Context whose operations wait for the cotangents; yields a function that makes tensors wait under XLA too.

    XLA ignores control dependencies, and would merge the second run with the first. It can't merge computations of
    different numbers. An optimization barrier has no effect on CPUs.
    """
    tensors = [tf.convert_to_tensor(cotangent) for cotangent in cotangents if cotangent is not None]
    with tf.control_dependencies(tensors):
        # Zero for any cotangents. An unused output's cotangent is a constant.
        first = [tf.cast(tf.reduce_max(tf.math.real(tf.reshape(tensor, [-1])[:1])), "float32") for tensor in tensors]
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
