"""What each part of a model keeps for the backward pass, and what it costs to run, read off a traced step."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.engine.probes.untouched import untouched
from keras_paragrad.engine.step.operations import check_repeatable
from keras_paragrad.engine.step.segments import Part, functional_of, run_in_parts
from keras_paragrad.flops import flops_of_operation

# Examples in the traced batch. Of one, layers may drop the axis.
_EXAMPLES = 2
# A dimension that the model leaves open, by the rank of its input: steps of a sequence, or pixels.
_OPEN = {4: 224, 5: 32}
# Of what models take steps for. Some models have an end.
_OPEN_STEPS = (128, 64, 16)
# How many FLOPs take as long as a byte takes to be written; about the same on CPUs and GPUs.
_PER_BYTE = 20
_SAME_BYTES = {"ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient"}
_NOT_COMPUTED = {"Const", "Placeholder"}


class PartCost(NamedTuple):
    """What one part of a model takes, for an example.

    Attributes:
        kept: Bytes of its tensors that the backward pass uses, without those that go on to other parts.
        leaving: Bytes of those that go on, as far as the backward pass uses them.
        work: What it costs to run, in FLOPs.
        repeatable: Whether it does the same when it runs again.
    """

    kept: float
    leaving: float
    work: float
    repeatable: bool


class ModelCost(NamedTuple):
    """What the parts of a model take, and the whole step.

    Attributes:
        parts: For each part.
        entering: The bytes of floats that each part takes from others, for an example.
        work: What a forward and backward pass of the whole model costs, in FLOPs for an example.
    """

    parts: list[PartCost]
    entering: list[float]
    work: float


def measure_parts(model: keras.Model, functional: Any, parts: Sequence[Part]) -> ModelCost:
    """Traces a forward and backward pass, which is not run.

    Args:
        model: A built model with symbolic inputs.
        functional: The Functional model, it or one in it, that is cut into parts.
        parts: Its parts.
    """
    ranges: list[tuple[int, int, set[str]]] = []

    def noting(part: Part, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            start = len(graph.get_operations())
            outputs = run(*arguments, **keywords)
            leaving = {_source(each).name for each in outputs.values() if tf.is_tensor(each)}
            ranges.append((start, len(graph.get_operations()), leaving))
            return outputs

        return noted

    def traced(steps: int) -> tuple[list[tf.Operation], int]:
        ranges.clear()
        return _traced(model, steps)

    undo = run_in_parts(functional, [(part, noting) for part in parts])
    try:
        steps, (operations, forward) = _first_that_works(traced)
    finally:
        undo()
    used = _used_backward(operations, forward)
    work = [_work(operation) / _EXAMPLES for operation in operations]
    costs = []
    for part, (start, end, names) in zip(parts, ranges, strict=True):
        held = [(each.name in names, _bytes(each) / _EXAMPLES) for index, each in used if start <= index < end]
        kept, leaving = (sum(bytes for leaves, bytes in held if leaves is asked) for asked in (False, True))
        costs.append(PartCost(kept, leaving, sum(work[start:end]), _repeatable(part.name, operations[start:end])))
    entering = [sum(_bytes_for_an_example(tensor, steps) for tensor in part.floats) for part in parts]
    return ModelCost(costs, entering, sum(work))


def _first_that_works(trace: Callable[[int], Any]) -> Any:
    *others, last = _OPEN_STEPS
    for steps in others:
        with contextlib.suppress(Exception):
            return steps, trace(steps)
    return last, trace(last)


def _bytes_for_an_example(tensor: keras.KerasTensor, steps: int) -> float:
    return math.prod(_closed(tensor.shape, steps)[1:]) * tf.as_dtype(tensor.dtype).size


def _closed(shape: Sequence[int | None], steps: int) -> list[int]:
    """A shape without open dimensions."""
    first, *others = shape or (None,)
    size = _OPEN.get(len(shape), steps)
    return [_EXAMPLES if first is None else first, *(size if each is None else each for each in others)]


def _traced(model: keras.Model, steps: int) -> tuple[list[tf.Operation], int]:
    """The operations of a forward and backward pass, and how many of them are of the forward pass."""
    variables = list({id(variable): variable for variable in model.variables}.values())
    inputs = keras.tree.map_structure(
        lambda each: tf.TensorSpec(_closed(each.shape, steps) if each.shape else [], each.dtype),
        functional_of(model).input,
    )
    marks = []

    def step(inputs, values):
        # Nothing of the model is read or changed.
        scope = keras.StatelessScope(list(zip(variables, values, strict=True)), collect_losses=True)
        with tf.GradientTape(persistent=False) as tape, untouched(model, scope):
            watched = [value for variable, value in zip(variables, values, strict=True) if variable.trainable]
            tape.watch(watched)
            outputs = model(inputs, training=True)
            floats = [each for each in keras.tree.flatten(outputs) if each.dtype.is_floating]
        marks.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return [each for each in tape.gradient(floats, watched) if each is not None]

    values = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    graph = tf.function(step, autograph=False).get_concrete_function(inputs, values).graph
    return graph.get_operations(), marks[-1]


def _used_backward(operations: Sequence[tf.Operation], forward: int) -> list[tuple[int, tf.Tensor]]:
    """The tensors that the forward pass makes and the backward pass uses, with the index of what makes each."""
    places = {operation.name: index for index, operation in enumerate(operations[:forward])}
    used = {}
    for operation in operations[forward:]:
        for tensor in operation.inputs:
            source = _source(tensor)
            if source.op.name in places and source.op.type not in _NOT_COMPUTED:
                used[source.name] = places[source.op.name], source
    return list(used.values())


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory this one shares."""
    while tensor.op.type in _SAME_BYTES:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _bytes(tensor: tf.Tensor) -> int:
    # What loops keep has no shape, nor has what depends on the data.
    if tensor.dtype in (tf.variant, tf.resource, tf.string):
        return 0
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _work(operation: tf.Operation) -> float:
    if operation.type in _SAME_BYTES | _NOT_COMPUTED:
        return 0
    return (flops_of_operation(operation) or 0) + _PER_BYTE * sum(map(_bytes, operation.outputs))


def _repeatable(name: str, operations: Iterable[tf.Operation]) -> bool:
    try:
        check_repeatable(name, operations)
    except ValueError:
        return False
    return True
