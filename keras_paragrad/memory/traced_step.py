"""Traces a model's training step, without running it and without memory for variables."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.model import all_variables, words_of
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.private import Functional
from keras_paragrad.compat.types import Gradients, GradientTensor, Specs, Structure
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


def traced_steps(
    model: keras.Model,
    sizes: Sequence[int],
    batch: Specs = None,
    count_flops: Callable[[tf.Operation], int | None] | None = None,
    *,
    length: int | None = None,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> list[TracedStep]:
    """A model's `train_step` on one device for batches of several sizes, from one trace.

    Traces it with the slices of `microbatch` and without compiled metrics, in a separate thread, where no strategy is
    active. The model is not changed.

    Args:
        model: A compiled and built model.
        sizes: Rows of the batches.
        batch: The `tf.TypeSpec` of a batch, by default derived from the model.
        count_flops: Counts the floating-point operations of an operation.
        length: The size of the inputs' axes of unknown size.
        optimizer: The optimizer, if not the model's.

    Raises:
        ValueError: The inputs or targets can't be derived, an optimizer can't be copied, or batches of any size can't
            be traced. The message says what to write.
    """
    shapes = [variable.shape for variable in all_variables(model)]
    shapes += [leaf.shape[1:] for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.TensorSpec)]
    known = {size for shape in shapes for size in shape if size}
    primes = (prime for prime in _PRIMES if all(size % prime for size in known))
    # A model may take batches of one size alone.
    traced = sizes[0] if len(set(sizes)) == 1 else next(primes)
    resized = [Resized(rows, traced, count_flops) for rows in sizes]
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_traced, model, traced, resized, batch, length, optimizer).result()


def _traced(
    model: keras.Model,
    rows: int,
    sizes: Sequence[Resized],
    data: Specs,
    length: int | None,
    optimizer: keras.optimizers.Optimizer | None,
) -> list[TracedStep]:
    """Traces the step for the first batch that its loss accepts, and reads it for batches of some sizes."""
    with untouched(model, without_values(all_variables(model))):
        problems: list[Exception] = []
        for batch in candidate_batches(model, rows, length) if data is None else [with_batch_size(data, rows, length)]:
            calls: list[_Call] = []
            # A loss may raise any error for targets that don't suit it.
            try:
                with untouched(model, without_memory()):
                    model.__dict__["_compile_metrics"] = None
                    optimizers = _replaced_optimizers(model, optimizer)
                    for copied in optimizers:
                        _record(copied, calls)
                    builder = STEP_BUILDER.of(model)
                    sliced = isinstance(builder, StepBuilder) and builder.stages.split
                    step = releasing(builder.one_step if sliced else model.train_step)
                    graph = tf.function(step, autograph=False).get_concrete_function(batch).graph
            except Exception as error:
                problems.append(error)
                continue
            # A step that creates variables is traced twice.
            calls = [call for call in calls if call.graph is graph]
            return [_traced_step_of(graph, size, optimizers, calls, batch) for size in sizes]
        raise ValueError(
            f"The training step of {model.name!r} can't be traced without its data: {words_of(problems[0])}"
        ) from problems[0]


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
    functional = getattr(model, "_functional", None) or model
    if isinstance(functional, Functional):
        inputs: Structure = functional.input
    else:
        shapes = model.built and (model.get_build_config() or {}).get("input_shape")
        if not shapes:
            raise ValueError(
                f"{model.name!r} doesn't say what its inputs are. Build it first: model.build(shape), or call it on a "
                "batch. Or build it from keras.Input."
            )
        inputs = keras.tree.map_shape_structure(lambda shape: keras.KerasTensor((None, *shape[1:])), shapes)
    x = with_batch_size(
        keras.tree.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype, tensor.name), inputs),
        rows,
        length,
    )
    symbolic = keras.tree.map_structure(
        lambda spec: keras.KerasTensor(spec.shape, keras.backend.standardize_dtype(spec.dtype)), x
    )
    with untouched(model, never_run()):
        outputs = model.compute_output_spec(symbolic)

    def dense_target(output: keras.KerasTensor) -> tf.TensorSpec:
        # Targets are not in half precision.
        half = output.dtype in ("float16", "bfloat16")
        return tf.TensorSpec(output.shape, "float32" if half else output.dtype)

    dense = keras.tree.map_structure(dense_target, outputs)
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
                f"Memory depends on sizes that {leaf} leaves open. Say what they are: dist.estimate(model, batch_size, "
                "length=128), or --length 128; and choose shard=None, 'optimizer' or 'parameters' by it."
            )
        return tf.TensorSpec((rows, *(length if size is None else size for size in shape[1:])), leaf.dtype)

    return tf.nest.map_structure(resize, spec)


def _targets_by_loss(loss: object, dense: Specs, labels: Specs) -> Specs:
    """Targets in the form that each output's loss takes: labels for what is called sparse."""

    def is_sparse(loss: object) -> bool:
        names = (loss, getattr(loss, "name", ""), getattr(loss, "__name__", ""), type(loss).__name__)
        return any("sparse" in name.lower() for name in names if isinstance(name, str))

    specs = list(zip(keras.tree.flatten(dense), keras.tree.flatten(labels), strict=True))
    losses = keras.tree.flatten(loss)
    losses = losses * len(specs) if len(losses) == 1 else losses
    if len(losses) != len(specs):
        return dense
    targets = [pair[is_sparse(output_loss)] for output_loss, pair in zip(losses, specs, strict=True)]
    return keras.tree.pack_sequence_as(dense, targets)
