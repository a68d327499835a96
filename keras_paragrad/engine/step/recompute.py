"""Functions that run again in the backward pass, instead of keeping what it needs of the first run.

A function is cut out of the step as a `tf.custom_gradient` of all that it reads: its tensors, its weights, and the
state from before the call. So the second run draws the same numbers and changes nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import keras
import tensorflow as tf

from keras_paragrad.compat.compiled_call import compiled_by_itself
from keras_paragrad.compat.layers import (
    CallState,
    full_precision,
    mask_of,
    may_be_differentiated,
)
from keras_paragrad.compat.leaves import dense_parts, has_gradient, rebuilt
from keras_paragrad.engine.step.gradient_functions import keep_with_graphs
from keras_paragrad.engine.step.reads import Reads, in_scope_of_others
from keras_paragrad.engine.step.stateful_ops import check_operations
from keras_paragrad.storage.gathering import call_with_gather, install_gather
from keras_paragrad.storage.storage import storage_of


class _Known(NamedTuple):
    """What a function reads that is no argument of its.

    Attributes:
        weights: Trainable variables.
        made: What makes each of the weights, in each of the two runs, of what is kept.
        kept: How they are kept from the first run to the second; gradients are taken of these.
        state: Other variables.
        before: Their values before the call.
    """

    weights: list[keras.Variable]
    made: list[Callable[[tf.Tensor], tf.Tensor]]
    kept: list[tf.Tensor]
    state: list[keras.Variable]
    before: list[tf.Tensor]

    @classmethod
    def of(cls, variables: Sequence[keras.Variable]) -> Self:
        each = list({id(variable): variable for variable in variables}.values())
        weights = [variable for variable in each if variable.trainable]
        state = [variable for variable in each if not variable.trainable]
        with full_precision():
            before = [tf.identity(tf.convert_to_tensor(variable.value)) for variable in state]
            recomputed = [storage_of(variable).recompute() for variable in weights]
            kept = [tensor for tensor, _ in recomputed]
            return cls(weights, [made for _, made in recomputed], kept, state, before)

    def read(self, kept: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The weights as layers read them, made in each of the two runs from what is kept."""
        return [made(each) for made, each in zip(self.made, kept, strict=True)]


class _Function(NamedTuple):
    """A function that calls layers, and what errors call it."""

    call: Callable[..., Any]
    name: str
    layers: Sequence[keras.layers.Layer]

    @property
    def variables(self) -> list[keras.Variable]:
        return [variable for layer in self.layers for variable in layer.variables]


class _Run:
    """One call of a function, and what came of it."""

    def __init__(self, function: _Function, arguments: tuple, keywords: dict, variables: Sequence[keras.Variable]):
        self.function, self.structure = function, (arguments, keywords)
        self.known = _Known.of(variables)
        self.called = CallState()
        self.leaves = keras.tree.flatten(self.structure)
        self.masks = [mask_of(leaf) for leaf in self.leaves]
        self.tensors = [each for leaf in self.leaves for each in dense_parts(leaf)]
        self.places = [place for place, tensor in enumerate(self.tensors) if has_gradient(tensor)]
        self.result: Any = None
        self.missing: list[keras.Variable] = []
        self.losses: list[tf.Tensor] = []
        self.updated: list[keras.Variable] = []
        self.updates: list[tuple[keras.Variable, tf.Tensor]] = []

    @property
    def differentiable(self) -> list[tf.Tensor]:
        """What gradients are taken of."""
        return [*(self.tensors[place] for place in self.places), *self.known.kept]

    def __call__(self) -> Any:
        """Runs it, and returns its outputs."""
        made: list[Any] = []

        @tf.custom_gradient
        def recomputed(*tensors):
            with _made_operations() as operations:
                with tf.control_dependencies(tensors[: len(self.places)]):
                    # Weights in shards are gathered where they are needed, and not all before the step.
                    weights = self.known.read(tensors[len(self.places) :])
                parts, masks, losses, values = compiled_by_itself(
                    self._first, self._filled(tensors), weights, self.known.before
                )
            if not self.missing:
                check_operations(self.function.name, operations)
            made[:] = [parts, masks, values]
            return [part for each in parts for part in each if has_gradient(part)] + losses, self._gradient(tensors)

        found: Any = recomputed(*self.differentiable)
        parts, masks, values = made
        again = iter(found)
        passed = [[next(again) if has_gradient(part) else part for part in each] for each in parts]
        self.losses = list(again)
        self.updates = list(zip(self.updated, values, strict=True))
        return keras.tree.pack_sequence_as(self.result, rebuilt(keras.tree.flatten(self.result), passed, masks))

    def _first(self, tensors: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor]) -> Any:
        """The first run; what it leaves are tensors alone, as it may be compiled."""
        self.result, reads = self._call(tensors, weights, state)
        self.missing = list(reads.missing.values())
        self.updated = [variable for variable, _ in reads.updates]
        flat = keras.tree.flatten(self.result)
        values = [value for _, value in reads.updates]
        return [dense_parts(leaf) for leaf in flat], [mask_of(leaf) for leaf in flat], reads.losses, values

    def _gradient(self, tensors: Sequence[tf.Tensor]) -> Callable[..., Any]:
        def second(tensors: Any, weights: Any, state: Any, cotangents: Any) -> Any:
            watched = [*(tensors[place] for place in self.places), *weights]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(watched)
                result, reads = self._call(tensors, weights, state)
                results = _differentiable(result, reads.losses)
            # `None` where there is none: an optimizer leaves alone a weight that has no gradient.
            return tape.gradient(results, watched, cotangents)

        def gradient(*cotangents: Any, variables: Any = None) -> list[Any]:
            assert not variables, "operations that read variables are refused"
            with self.called.entered(), _after(cotangents) as later:
                weights = [tf.identity(each) for each in self.known.read(tensors[len(self.places) :])]
                found = compiled_by_itself(
                    second, later(self._filled(tensors)), weights, later(self.known.before), list(cotangents)
                )
            # A gathered weight may have another dtype than its shards.
            return [
                each if each is None else tf.cast(each, tensor.dtype)
                for each, tensor in zip(found, tensors, strict=True)
            ]

        return gradient

    def _filled(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors of the arguments, with those that gradients are taken of replaced."""
        filled = list(self.tensors)
        for place, tensor in zip(self.places, tensors, strict=False):
            filled[place] = tensor
        return filled

    def _call(
        self, tensors: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor]
    ) -> tuple[Any, Reads]:
        remaining = iter(tensors)
        parts = [[next(remaining) for _ in dense_parts(leaf)] for leaf in self.leaves]
        arguments, keywords = keras.tree.pack_sequence_as(self.structure, rebuilt(self.leaves, parts, self.masks))
        built = len(self.function.variables)
        values = [*zip(self.known.weights, weights, strict=True), *zip(self.known.state, state, strict=True)]
        why = "the gradient of that can't be had from a second run. Leave it out of `layers`."
        with Reads(self.function.name, values, why) as reads:
            result = self.function.call(*arguments, **keywords)
        if len(self.function.variables) != built:
            raise ValueError(
                f"{self.function.name!r} made variables while it was traced, and can't be run a second time. Build the "
                "model before: call it once on a batch, as in model(x)."
            )
        return result, reads


class Recomputed:
    """A function of tensors that runs again in the backward pass.

    Args:
        function: Calls layers. It may be nested in others that are recomputed: the outermost is.
        name: What errors call it.
        layers: The layers that it calls.
        owner: The layer that the losses added in it are added to.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        layers: Sequence[keras.layers.Layer],
        owner: keras.layers.Layer,
    ):
        functools.update_wrapper(self, function)
        self.function, self.owner = _Function(function, name, layers), owner

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((arguments, keywords)))
        if symbolic or tf.executing_eagerly() or in_scope_of_others() or not may_be_differentiated():
            return self.function.call(*arguments, **keywords)
        run = _Run(self.function, arguments, keywords, self.function.variables)
        if not run.differentiable:
            return self.function.call(*arguments, **keywords)
        outputs = run()
        if run.missing:
            # It reads what belongs to none of its layers, such as the global seed or a weight of another layer.
            run = _Run(self.function, arguments, keywords, [*self.function.variables, *run.missing])
            outputs = run()
        keep_with_graphs([tf.compat.v1.get_default_graph()])
        for loss in run.losses:
            # Not `owner.add_loss`: a Functional model refuses it.
            keras.layers.Layer.add_loss(self.owner, loss)
        for variable, value in run.updates:
            variable.assign(value)
        return outputs


@contextlib.contextmanager
def _made_operations() -> Iterator[list[tf.Operation]]:
    """Context that ends with a list of the operations that were made in it, without those of other replicas."""
    graph = tf.compat.v1.get_default_graph()
    before, made = len(graph.get_operations()), []
    with tf.name_scope("recomputed") as scope:
        yield made
    made += [each for each in graph.get_operations()[before:] if each.name.startswith(scope)]


@contextlib.contextmanager
def _after(cotangents: Sequence[Any]) -> Iterator[Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]]:
    """Context whose operations wait for the cotangents; gives what makes tensors wait that XLA sees to.

    XLA ignores control dependencies, and would merge the second run with the first. It can't merge what is computed
    from other numbers; an optimization barrier does not hold on CPUs.
    """
    tensors = [tf.convert_to_tensor(each) for each in cotangents if each is not None]
    with tf.control_dependencies(tensors):
        # Zero whatever is in the cotangents. One of an output that is not used is a constant.
        first = [tf.cast(tf.reduce_max(tf.math.real(tf.reshape(each, [-1])[:1])), "float32") for each in tensors]
        zero = tf.add_n([tf.cast(each > float("inf"), "float32") for each in first])

        def later(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            numbers = [tensor.dtype.is_floating or tensor.dtype.is_integer for tensor in tensors]
            return [
                tensor - tf.cast(zero, tensor.dtype) if number else tf.identity(tensor)
                for tensor, number in zip(tensors, numbers, strict=True)
            ]

        yield later


def _differentiable(result: Any, losses: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    parts = [part for leaf in keras.tree.flatten(result) for part in dense_parts(leaf)]
    return [part for part in parts if has_gradient(part)] + list(losses)


def is_recomputed(layer: keras.layers.Layer) -> bool:
    """Whether the layer's calls run again in the backward pass."""
    return isinstance(vars(layer).get("call"), Recomputed)


def recompute_layer(layer: keras.layers.Layer) -> Callable[[], None]:
    """Has the calls of a layer run again in the backward pass.

    Args:
        layer: The layer, with all that it calls.

    Returns:
        Undoes it.
    """
    # Bypass Keras's tracking: a method is not state of the layer.
    own = vars(layer)
    before = {"call": own["call"]} if "call" in own else {}
    made = Recomputed(own.get("call") or functools.partial(call_with_gather, layer), layer.name, [layer], layer)
    own["call"] = functools.update_wrapper(made, layer.call)

    def undo() -> None:
        if own.get("call") is made:
            del own["call"]
            own.update(before)
            install_gather(layer)

    return undo
