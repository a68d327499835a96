"""Runs a Functional model in parts, which are consecutive operations: stages, segments, or segments of stages.

A stage runs on one device of a pipeline. A segment may run again in the backward pass.

    for each stage, and for each segment in it: outputs = function(inputs), which calls operations in Keras's order
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import keras
import tensorflow as tf

from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.private import Functional
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.calls.recomputed import Recomputed, is_recomputed

_RUN = "_run_through_graph"
FunctionalModel: TypeAlias = Functional
# Tensors by the index of their input or output.
Tensors = dict[int, tf.Tensor]
# Maps an operation to its replacement.
OperationFn = Callable[[keras.Operation], Callable[..., Structure]]
# Maps a part's inputs, with an `OperationFn`, to its outputs.
RunPart = Callable[..., Tensors]


class KerasNode(Protocol):
    """Keras's `Node`: one call of an operation."""

    operation: keras.Operation
    arguments: Any
    input_tensors: list[keras.KerasTensor]
    outputs: list[keras.KerasTensor]
    is_input: bool


# Maps a part, and the function that runs it, to the function to call instead.
Wrap = Callable[["Part", RunPart], RunPart]


class Part(NamedTuple):
    """Consecutive operations of a Functional model.

    Attributes:
        nodes: The calls of operations, in Keras's order.
        inputs: The symbolic tensors that they take from other parts.
        outputs: The symbolic tensors that other parts take from them, or that the model returns.
    """

    nodes: tuple[KerasNode, ...]
    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers among the operations."""
        called = [node.operation for node in self.nodes]
        return list({id(layer): layer for layer in called if isinstance(layer, keras.layers.Layer)}.values())

    @property
    def name(self) -> str:
        """The first and last layers' names."""
        names = [layer.name for layer in self.layers] or [self.nodes[0].operation.name]
        return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"

    @property
    def floats(self) -> list[keras.KerasTensor]:
        """The inputs that are stored for a second run."""
        return [tensor for tensor in self.inputs if _is_float(tensor)]


def functional_of(model: keras.Model) -> Functional | None:
    """The Functional model that a model's call runs, or `None`."""
    if isinstance(model, keras.Sequential):
        return model._functional if type(model).call is keras.Sequential.call else None
    return model if isinstance(model, Functional) and type(model).call is Functional.call else None


def calls_of(functional: Functional) -> list[KerasNode]:
    """The calls of a Functional model's operations, in Keras's order."""
    depths = functional._nodes_by_depth
    return [node for depth in sorted(depths, reverse=True) for node in depths[depth] if not node.is_input]


def parts_of(functional: Functional) -> list[Part]:
    """The smallest parts of a model such that one tensor of floats connects neighboring parts.

    Inputs and outputs of the model don't count, as they are always stored.
    """
    nodes = calls_of(functional)
    last_use = {id(tensor): index for index, node in enumerate(nodes) for tensor in node.input_tensors}
    outputs = {id(tensor) for tensor in functional.outputs}
    # The `id`s of tensors of floats that later operations take.
    alive: set[int] = set()
    groups: list[list[KerasNode]] = [[]]
    for index, node in enumerate(nodes):
        groups[-1].append(node)
        alive |= {id(tensor) for tensor in node.outputs if _is_float(tensor)} - outputs
        alive = {tensor_id for tensor_id in alive if last_use.get(tensor_id, -1) > index}
        if len(alive) <= 1 and index + 1 < len(nodes):
            groups.append([])
    return [part_of(functional, group) for group in groups]


def join_parts(functional: Functional, parts: Sequence[Part]) -> Part:
    """Joins consecutive parts."""
    return part_of(functional, [node for part in parts for node in part.nodes])


def single_nested_model(part: Part) -> keras.Model | None:
    """The nested model that a part calls, if the part is that one call; else `None`."""
    operation = part.nodes[0].operation
    return operation if len(part.nodes) == 1 and isinstance(operation, keras.Model) else None


def recompute_parts(
    owner: keras.Model, functional: Functional, parts: Sequence[tuple[Part, bool]]
) -> Callable[[], None]:
    """Makes parts of a model run again in the backward pass. Returns a function that undoes that.

    `parts` are all parts, in order, each with a flag to recompute it. `owner` gets the losses that layers add.
    """

    def recomputed(part: Part, run: RunPart, again: bool) -> RunPart:
        return Recomputed(run, part.name, part.layers, owner) if again else run

    wrapped = [(part, functools.partial(recomputed, again=again)) for part, again in parts]
    return _GraphRunner.of(functional).set_parts("segments", wrapped)


def run_in_stages(functional: Functional, stages: Sequence[tuple[Part, Wrap]]) -> Callable[[], None]:
    """Makes a Functional model run in stages, within which recomputed segments stay as they are.

    `stages` are all stages, in order, each with a wrapper of its function. Returns a function that undoes the change.
    """
    return _GraphRunner.of(functional).set_parts("stages", stages)


def run_in_parts(functional: Functional, parts: Sequence[tuple[Part, Wrap]]) -> Callable[[], None]:
    """As `run_in_stages`, but in place of the model's stages and segments."""
    before = vars(functional).pop(_RUN, None)
    undo = _GraphRunner.of(functional).set_parts("segments", parts)

    def restore() -> None:
        undo()
        if before is not None:
            vars(functional)[_RUN] = before

    return restore


class _GraphRunner:
    def __init__(self, functional: Functional):
        self.functional = functional
        # All parts, each with a wrapper of its function. The boundary of a stage cuts a segment in two.
        self.stages: Sequence[tuple[Part, Wrap]] | None = None
        self.segments: Sequence[tuple[Part, Wrap]] | None = None
        self.functions: list[tuple[Part, RunPart]] = []

    @classmethod
    def of(cls, functional: Functional) -> Self:
        return vars(functional).get(_RUN) or cls(functional)

    def set_parts(self, name: str, parts: Sequence[tuple[Part, Wrap]]) -> Callable[[], None]:
        """Sets the attribute `stages` or `segments`. Returns a function that undoes that."""

        def undo() -> None:
            if getattr(self, name) is parts:
                self._set(name, None)

        self._set(name, parts)
        return undo

    def _set(self, name: str, parts: Sequence[tuple[Part, Wrap]] | None) -> None:
        """Sets stages or segments, and rebuilds the functions that run the model."""
        setattr(self, name, parts)
        # Bypass Keras's tracking: a method is not state of the model.
        attributes = vars(self.functional)
        if self.stages is None and self.segments is None:
            attributes.pop(_RUN, None)
            return
        attributes[_RUN] = self
        if self.stages is None:
            self.functions = self._segments_in(None)
        else:
            self.functions = [(part, wrap(part, self._run_of(part))) for part, wrap in self.stages]

    def _run_of(self, stage: Part) -> RunPart:
        if self.segments is None:
            return functools.partial(_run_part, stage)
        functions = self._segments_in(stage)

        def run(known: Tensors, operation_fn: OperationFn) -> Tensors:
            tensors = {id(stage.inputs[index]): tensor for index, tensor in known.items()}
            _call_each(functions, tensors, operation_fn)
            return {index: tensors[id(output)] for index, output in enumerate(stage.outputs) if id(output) in tensors}

        return run

    def _segments_in(self, stage: Part | None) -> list[tuple[Part, RunPart]]:
        """The segments of a stage, or of the whole model, each with the function that runs it."""
        inside = {id(node) for node in stage.nodes} if stage else None
        functions = []
        for part, wrap in self.segments or ():
            nodes = [node for node in part.nodes if inside is None or id(node) in inside]
            if nodes:
                piece = part if len(nodes) == len(part.nodes) else part_of(self.functional, nodes)
                functions.append((piece, wrap(piece, functools.partial(_run_part, piece))))
        return functions

    def __call__(
        self,
        inputs: Structure,
        operation_fn: OperationFn = lambda op: op,
        call_fn: Callable[..., Structure] | None = None,
    ) -> Structure:
        """Takes the place of `_run_through_graph`, which still gets symbolic tensors, and calls with `call_fn`."""
        functional = self.functional
        flat = keras.tree.flatten(inputs)
        if call_fn is not None or any(isinstance(tensor, keras.KerasTensor) for tensor in flat):
            plain = type(functional)._run_through_graph
            return plain(functional, inputs, operation_fn=operation_fn, call_fn=call_fn)
        tensors = dict(zip(map(id, functional.inputs), flat, strict=True))
        _call_each(self.functions, tensors, operation_fn)
        outputs = [tensors[id(output)] for output in functional.outputs]
        return keras.tree.pack_sequence_as(functional.output, outputs)

    @property
    def recomputed(self) -> list[tuple[int, bool]]:
        """The number of operations in each segment, and whether it is recomputed."""
        segments = self._segments_in(None)
        return [(len(part.nodes), isinstance(function, Recomputed)) for part, function in segments]


def _call_each(functions: Sequence[tuple[Part, RunPart]], tensors: Tensors, operation_fn: OperationFn) -> None:
    """Calls the function of each part, and adds the outputs to `tensors`."""
    for part, function in functions:
        inputs = {index: tensors[id(tensor)] for index, tensor in enumerate(part.inputs) if id(tensor) in tensors}
        for index, tensor in function(inputs, operation_fn=operation_fn).items():
            tensors[id(part.outputs[index])] = tensor


def describe_recomputed(model: keras.Model) -> dict[int, str]:
    """Describes what runs again in the backward pass, by index in `all_layers`; -1 is the model."""
    descriptions = {}
    for index, layer in enumerate((model, *all_layers(model)), -1):
        functional = functional_of(layer) if isinstance(layer, keras.Model) else None
        if is_recomputed(layer):
            descriptions[index] = "as a whole"
        elif runs_in_segments(functional):
            segments = vars(functional)[_RUN].recomputed
            listed = ", ".join(f"{count}{' again' if again else ''}" for count, again in segments)
            descriptions[index] = f"operations: {listed}"
    return descriptions


def runs_in_segments(functional: Functional | None) -> bool:
    """Whether a Functional model runs in segments, which may be recomputed."""
    runner = vars(functional).get(_RUN) if functional is not None else None
    return runner is not None and runner.segments is not None


def recomputes_parts(functional: Functional | None) -> bool:
    """Whether some parts of a Functional model run again in the backward pass."""
    runner = vars(functional).get(_RUN) if functional is not None else None
    return runner is not None and any(again for _, again in runner.recomputed)


def part_of(functional: Functional, nodes: Sequence[KerasNode]) -> Part:
    """The part of a Functional model that has these consecutive calls."""
    inside = {id(tensor) for node in nodes for tensor in node.outputs}
    ids = set(map(id, nodes))
    others = [node for same_depth in functional._nodes_by_depth.values() for node in same_depth if id(node) not in ids]
    used = {id(tensor) for node in others for tensor in node.input_tensors} | set(map(id, functional.outputs))
    inputs = {id(tensor): tensor for node in nodes for tensor in node.input_tensors if id(tensor) not in inside}
    outputs = {id(tensor): tensor for node in nodes for tensor in node.outputs if id(tensor) in used}
    return Part(tuple(nodes), tuple(inputs.values()), tuple(outputs.values()))


def _run_part(part: Part, tensors: Tensors, operation_fn: OperationFn) -> Tensors:
    """Makes a part's calls, as Keras does. Maps the part's inputs, by index, to its outputs, by index."""
    known = {id(part.inputs[index]): tensor for index, tensor in tensors.items()}
    for node in part.nodes:
        if any(id(tensor) not in known for tensor in node.input_tensors):
            continue
        arguments, keywords = node.arguments.fill_in(known)
        outputs = operation_fn(node.operation)(*arguments, **keywords)
        known.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=False))
    return {index: known[id(output)] for index, output in enumerate(part.outputs) if id(output) in known}


def _is_float(tensor: keras.KerasTensor) -> bool:
    return keras.backend.is_float_dtype(tensor.dtype) or "complex" in tensor.dtype
