"""Measures the bytes that each part of a model stores for the backward pass, and its FLOPs, on a traced step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.operations import SAME_BUFFER, source_of
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.step.segments import FunctionalModel, Part, RunPart, Tensors, functional_of, run_in_parts
from keras_paragrad.engine.tracing.effects import check_repeatable
from keras_paragrad.engine.tracing.untouched import trace_untouched
from keras_paragrad.flops import flops_of_operation

# Examples in the traced batch; layers may squeeze an axis of size 1.
_EXAMPLES = 2
# Sizes for unknown dimensions, by the rank of the input: pixels, or sequence lengths.
_SIZES = {4: 224, 5: 32}
# Sequence lengths to try; some models have a maximum.
_LENGTHS = (128, 64, 16)
# FLOPs in the time it takes to write a byte; about the same on CPUs and GPUs. `work` counts bytes as FLOPs by this.
_PER_BYTE = 20
_NOT_COMPUTED = {"Const", "Placeholder"}


class PartCost(NamedTuple):
    """Memory and work of one part of a model, per example.

    Attributes:
        stored_bytes: Bytes of its tensors that the backward pass uses, without its outputs.
        output_bytes: Bytes of its outputs that the backward pass uses.
        work: FLOPs of its forward pass, with the bytes that it writes.
        repeatable: Whether it can run again with the same result.
    """

    stored_bytes: float
    output_bytes: float
    work: float
    repeatable: bool


class ModelCost(NamedTuple):
    """Memory and work of a model's parts, and of a step.

    Attributes:
        parts: The cost of each part.
        input_bytes: Bytes of each part's floating-point inputs, per example.
        work: FLOPs of a forward and backward pass of the model, with the bytes that it writes, per example.
    """

    parts: list[PartCost]
    input_bytes: list[float]
    work: float


def measure_parts(model: keras.Model, functional: FunctionalModel, parts: Sequence[Part]) -> ModelCost:
    """Measures the parts of `functional`, which is `model` or one in it, by tracing a forward and backward pass."""
    # Of each part, in the graph: the indices of its first operation and after its last, and its outputs' names.
    ranges: list[tuple[int, int, set[str]]] = []

    def record(part: Part, run: RunPart) -> RunPart:
        def recorded(*arguments: Any, **keywords: Any) -> Tensors:
            graph = tf.compat.v1.get_default_graph()
            start = len(graph.get_operations())
            outputs = run(*arguments, **keywords)
            output_names = {source_of(output).name for output in outputs.values() if tf.is_tensor(output)}
            ranges.append((start, len(graph.get_operations()), output_names))
            return outputs

        return recorded

    length, operations, forward = 0, list[tf.Operation](), 0
    undo = run_in_parts(functional, [(part, record) for part in parts])
    try:
        # The first sequence length that the model accepts.
        for length in _LENGTHS:
            ranges.clear()
            try:
                operations, forward = _traced(model, length)
                break
            except Exception:
                if length == _LENGTHS[-1]:
                    raise
    finally:
        undo()
    used = _used_backward(operations, forward)
    work = [_work(operation) / _EXAMPLES for operation in operations]
    costs = []
    for part, (start, end, names) in zip(parts, ranges, strict=True):
        sizes = [(tensor.name in names, _bytes(tensor) / _EXAMPLES) for index, tensor in used if start <= index < end]
        stored = sum(size for is_output, size in sizes if not is_output)
        output_bytes = sum(size for is_output, size in sizes if is_output)
        try:
            check_repeatable(part.name, operations[start:end])
            repeatable = True
        except ValueError:
            repeatable = False
        costs.append(PartCost(stored, output_bytes, sum(work[start:end]), repeatable))
    input_bytes: list[float] = [
        sum(math.prod(_filled_shape(each.shape, length)[1:]) * tf.as_dtype(each.dtype).size for each in part.floats)
        for part in parts
    ]
    return ModelCost(costs, input_bytes, sum(work))


def _filled_shape(shape: Sequence[int | None], length: int) -> list[int]:
    """Fills in the unknown dimensions of a shape."""
    first, *others = shape or (None,)
    size = _SIZES.get(len(shape), length)
    return [_EXAMPLES if first is None else first, *(size if other is None else other for other in others)]


def _traced(model: keras.Model, length: int) -> tuple[list[tf.Operation], int]:
    """The operations of a forward and backward pass on sequences of a length, and how many the forward pass has."""
    variables = list({id(variable): variable for variable in model.variables}.values())
    # A Sequential model states its inputs' structure only in the Functional model that it builds.
    functional: Any = functional_of(model)
    inputs = keras.tree.map_structure(
        lambda spec: tf.TensorSpec(_filled_shape(spec.shape, length) if spec.shape else [], spec.dtype),
        functional.input,
    )
    forward_counts = []

    def step(inputs: Structure, values: list[tf.Tensor]):
        # Variables take the values passed in: the model's own are neither read nor changed.
        scope = keras.StatelessScope(list(zip(variables, values, strict=True)), collect_losses=True)
        with tf.GradientTape(persistent=False) as tape, scope:
            watched = [value for variable, value in zip(variables, values, strict=True) if variable.trainable]
            tape.watch(watched)
            outputs = model(inputs, training=True)
            floats = [output for output in keras.tree.flatten(outputs) if output.dtype.is_floating]
        forward_counts.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return [gradient for gradient in tape.gradient(floats, watched) if gradient is not None]

    values = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    graph = trace_untouched(model, step, inputs, values).graph
    return graph.get_operations(), forward_counts[-1]


def _used_backward(operations: Sequence[tf.Operation], forward: int) -> list[tuple[int, tf.Tensor]]:
    """The forward pass's tensors that the backward pass uses, with the index of the operation of each."""
    indices = {operation.name: index for index, operation in enumerate(operations[:forward])}
    used = {}
    for operation in operations[forward:]:
        for tensor in operation.inputs:
            source = source_of(tensor)
            if source.op.name in indices and source.op.type not in _NOT_COMPUTED:
                used[source.name] = indices[source.op.name], source
    return list(used.values())


def _bytes(tensor: tf.Tensor) -> int:
    # Tensors stored by loops, or that depend on the data, have no static shape.
    if tensor.dtype in (tf.variant, tf.resource, tf.string):
        return 0
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _work(operation: tf.Operation) -> float:
    """The FLOPs of an operation, with the bytes that it writes."""
    if operation.type in SAME_BUFFER | _NOT_COMPUTED:
        return 0
    return (flops_of_operation(operation) or 0) + _PER_BYTE * sum(map(_bytes, operation.outputs))
