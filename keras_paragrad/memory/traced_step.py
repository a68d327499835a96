"""Traces a model's training step, without running it and without memory for variables."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.model import all_variables, words_of
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.private import Functional
from keras_paragrad.compat.types import Gradients, GradientTensor, Specs, Step, Structure
from keras_paragrad.compat.variables import copy_built_optimizer, without_memory, without_values
from keras_paragrad.engine.step.interception import PlainApply, intercept_apply
from keras_paragrad.engine.tracing.gradient_functions import releasing
from keras_paragrad.engine.tracing.untouched import never_run, untouched
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory.blocks import Block, Resized, block_of
from keras_paragrad.storage.model_variables import STEP_BUILDER

# Batch sizes to trace with: primes larger than most axes, so that the batch dimension is recognized in tensor sizes.
_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061)


class VariableGradient(NamedTuple):
    """A variable's gradient in a traced step.

    Attributes:
        number, size: The gradient's number in the block, and its bytes.
        of_rows: Whether the gradient is sparse: of the rows that a batch looks up.
        resource: The number of the block's input that holds the variable, or `None`.
    """

    variable: keras.Variable
    number: int
    size: int
    of_rows: bool
    resource: int | None


class TracedStep(NamedTuple):
    """A traced training step.

    Attributes:
        block: Its operations.
        gradients: The gradients that optimizers get.
        updates_from: The index of the last update's first operation.
        optimizers: Copies of the optimizers, without memory.
        batch: The `tf.TypeSpec` of the batch.
    """

    block: Block
    gradients: list[VariableGradient]
    updates_from: int
    optimizers: list[keras.optimizers.Optimizer]
    batch: Specs


class _Call(NamedTuple):
    """A call of an optimizer's `apply` in a graph, after `position` operations."""

    graph: tf.Graph
    position: int
    pairs: list[tuple[GradientTensor, keras.Variable]]


def traced_step(
    model: keras.Model,
    rows: int,
    length: int | None = None,
    optimizer: keras.optimizers.Optimizer | None = None,
    batch: Specs = None,
) -> TracedStep:
    """Traces a model's `train_step` on one device, with the slices of `microbatch` and without compiled metrics.

    Runs in a separate thread, where no strategy is active. The model is not changed. `length` is the size of the
    inputs' axes of unknown size; the optimizer and the `tf.TypeSpec` of a batch are the model's, unless they are given.

    Raises:
        ValueError: The inputs or targets can't be derived, or an optimizer can't be copied. The message says what
            to write.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_traced, model, rows, length, optimizer, batch, [Resized(rows)]).result()[0]


def traced_steps(
    model: keras.Model,
    sizes: Sequence[int],
    batch: Specs = None,
    count_flops: Callable[[tf.Operation], int | None] | None = None,
) -> list[TracedStep]:
    """A model's `train_step` for batches of several sizes, from one trace; see `traced_step`.

    Args:
        model: A compiled and built model.
        sizes: Rows of the batches.
        batch: The `tf.TypeSpec` of a batch, by default derived from the model.
        count_flops: Counts the floating-point operations of an operation.

    Raises:
        ValueError: It can't be traced for batches of any size.
    """
    shapes = [variable.shape for variable in all_variables(model)]
    shapes += [leaf.shape[1:] for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.TensorSpec)]
    known = {size for shape in shapes for size in shape if size}
    primes = (prime for prime in _PRIMES if all(size % prime for size in known))
    # A model may take batches of one size alone.
    traced = sizes[0] if len(set(sizes)) == 1 else next(primes)
    resized = [Resized(rows, traced, count_flops) for rows in sizes]
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_traced, model, traced, None, None, batch, resized).result()


def _traced(
    model: keras.Model,
    rows: int,
    length: int | None,
    optimizer: keras.optimizers.Optimizer | None,
    data: Specs,
    sizes: Sequence[Resized],
) -> list[TracedStep]:
    """Traces the step for the first batch that its loss accepts, and reads it for batches of some sizes."""
    with untouched(model, without_values(all_variables(model))):
        problems: list[Exception] = []
        for batch in candidate_batches(model, rows, length) if data is None else [with_batch_size(data, rows, length)]:
            # A loss may raise any error for targets that don't suit it.
            try:
                graph, optimizers, calls = _graph_of(model, batch, optimizer)
            except Exception as error:
                problems.append(error)
            else:
                return [_traced_step_of(graph, size, optimizers, calls, batch) for size in sizes]
        raise ValueError(
            f"The training step of {model.name!r} can't be traced without its data: {words_of(problems[0])}"
        ) from problems[0]


def _graph_of(
    model: keras.Model, batch: Specs, optimizer: keras.optimizers.Optimizer | None
) -> tuple[tf.Graph, list[keras.optimizers.Optimizer], list[_Call]]:
    """The graph of a step, the optimizers, and the calls of their `apply`."""
    with untouched(model, without_memory()):
        model.__dict__["_compile_metrics"] = None
        optimizers = _replaced_optimizers(model, optimizer)
        calls: list[_Call] = []
        for copied in optimizers:
            _record(copied, calls)
        graph = tf.function(releasing(_step_of(model)), autograph=False).get_concrete_function(batch).graph
    # A step that creates variables is traced twice.
    return graph, optimizers, [call for call in calls if call.graph is graph]


def _traced_step_of(
    graph: tf.Graph,
    size: Resized,
    optimizers: list[keras.optimizers.Optimizer],
    calls: list[_Call],
    batch: Specs,
) -> TracedStep:
    """Finds the gradients and the update among the operations of a graph."""
    block, numbers, positions = block_of(graph, size)
    sizes = dict(zip(block.inputs, block.input_sizes, strict=True))
    sizes.update(pair for op in block.operations for pair in zip(op.outputs, op.sizes, strict=True))
    resources = {id(handle): numbers[inside.ref()] for handle, inside in graph.captures}
    gradients = []
    for gradient, variable in (pair for call in calls for pair in call.pairs):
        of_rows = isinstance(gradient, tf.IndexedSlices)
        number = numbers[(gradient.values if of_rows else gradient).ref()]
        resource = resources.get(id(variable.value.handle))
        gradients.append(VariableGradient(variable, number, sizes[number], of_rows, resource))
    # Of several optimizers, the last one updates when all gradients are computed.
    last = max((call.position for call in calls), default=-1)
    return TracedStep(block, gradients, positions[last], optimizers, batch)


def _step_of(model: keras.Model) -> Step:
    """The step to trace: in slices, if `microbatch` divides batches, or the model's own."""
    builder = STEP_BUILDER.of(model)
    return builder.one_step if isinstance(builder, StepBuilder) and builder.stages.split else model.train_step


def _replaced_optimizers(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None
) -> list[keras.optimizers.Optimizer]:
    """Replaces the optimizers among a model's attributes by copies, and returns the copies."""
    model.__dict__["optimizer"] = copy_built_optimizer(optimizer or model.optimizer, model.trainable_variables)
    copies = [model.__dict__["optimizer"]]
    accumulator = find_accumulator(copies[0])
    if accumulator is not None:
        # Avoids advice about the weights of micro-batches.
        accumulator.weighting = "uniform"
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer) and name != "optimizer":
            # Not built: which gradients the custom `train_step` passes to it is unknown before the trace.
            model.__dict__[name] = type(value).from_config(value.get_config())
            copies.append(model.__dict__[name])
    return copies


def _record(optimizer: keras.optimizers.Optimizer, calls: list[_Call]) -> None:
    """Records the gradients that an optimizer gets, and the number of operations before them."""

    def record(apply: PlainApply, grads: Gradients, trainable_variables: Sequence[keras.Variable] | None) -> None:
        variables = optimizer.trainable_variables if trainable_variables is None else trainable_variables
        graph = tf.compat.v1.get_default_graph()
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None and v.trainable]
        calls.append(_Call(graph, len(graph.get_operations()), pairs))
        return apply(grads, trainable_variables)

    intercept_apply(optimizer, record)


def candidate_batches(model: keras.Model, rows: int, length: int | None) -> Iterator[tuple[Specs, ...]]:
    """Batches of `tf.TensorSpec` that a built model may be trained on, the likeliest first; open axes get `length`."""
    x = _inputs(model, rows, length)
    with untouched(model, never_run()):
        outputs = model.compute_output_spec(keras.tree.map_structure(_symbolic, x))
    dense = keras.tree.map_structure(_dense_target, outputs)
    labels = keras.tree.map_structure(lambda target: tf.TensorSpec(target.shape[:-1] or target.shape, "int32"), dense)
    yield x, _targets_by_loss(model.loss, dense, labels)
    yield x, dense
    yield x, labels
    yield (x,)


def with_batch_size(spec: Specs, rows: int, length: int | None) -> Specs:
    """Sets the number of rows in the specs of a batch; refuses other unknown sizes without a `length` for them."""

    def resize(leaf: Any) -> tf.TensorSpec:
        shape = leaf.shape.as_list() if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank else [None, None]
        if None in shape[1:] and length is None:
            raise ValueError(
                f"Memory depends on dimensions whose size the data doesn't specify: {leaf}. Call dist.estimate(model, "
                "batch_size, length=128), and choose shard=None, 'optimizer' or 'parameters' by it."
            )
        return tf.TensorSpec((rows, *(length if size is None else size for size in shape[1:])), leaf.dtype)

    return tf.nest.map_structure(resize, spec)


def _inputs(model: keras.Model, rows: int, length: int | None) -> Specs:
    """The specs of the inputs."""
    structure = _structure(model)
    if structure is None:
        raise ValueError(
            f"{model.name!r} doesn't say what its inputs are. Build it first: model.build(shape), or call it on a "
            "batch. Or build it from keras.Input."
        )

    def spec_of(tensor: keras.KerasTensor):
        shape = tuple(tensor.shape)[1:]
        if None in shape and length is None:
            raise ValueError(
                f"The input {tensor.name!r} of {model.name!r} has dimensions of unknown size: {tuple(tensor.shape)}. "
                "Specify them: estimate(model, batch_size, length=128), or --length 128."
            )
        return tf.TensorSpec((rows, *(length if size is None else size for size in shape)), tensor.dtype)

    return keras.tree.map_structure(spec_of, structure)


def _structure(model: keras.Model) -> Structure:
    """A model's inputs as nested `KerasTensor`s."""
    functional = getattr(model, "_functional", None) or model
    if isinstance(functional, Functional):
        return functional.input
    config = model.get_build_config() if model.built else None
    if not config or config.get("input_shape") is None:
        return None
    return keras.tree.map_shape_structure(lambda shape: keras.KerasTensor((None, *shape[1:])), config["input_shape"])


def _symbolic(spec: tf.TensorSpec) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, keras.backend.standardize_dtype(spec.dtype))


def _dense_target(output: keras.KerasTensor) -> tf.TensorSpec:
    # Targets are not in half precision.
    half = output.dtype in ("float16", "bfloat16")
    return tf.TensorSpec(output.shape, "float32" if half else output.dtype)


def _targets_by_loss(loss: object, dense: Specs, labels: Specs) -> Specs:
    """Targets in the form that each output's loss takes."""
    specs = list(zip(keras.tree.flatten(dense), keras.tree.flatten(labels), strict=True))
    losses = keras.tree.flatten(loss)
    losses = losses * len(specs) if len(losses) == 1 else losses
    if len(losses) != len(specs):
        return dense
    targets = [pair[_is_sparse(output_loss)] for output_loss, pair in zip(losses, specs, strict=True)]
    return keras.tree.pack_sequence_as(dense, targets)


def _is_sparse(loss: object) -> bool:
    names = (loss, getattr(loss, "name", ""), getattr(loss, "__name__", ""), type(loss).__name__)
    return any("sparse" in name.lower() for name in names if isinstance(name, str))
