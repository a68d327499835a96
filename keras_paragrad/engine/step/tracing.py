"""A model's training step, traced without running anything and without memory for its variables."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import accumulating
from keras_paragrad.compat.model import all_variables
from keras_paragrad.compat.stand_ins import built_copy, stand_in, without_memory
from keras_paragrad.compat.state import state_of
from keras_paragrad.engine.probes.untouched import untouched
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.example import batches, sized
from keras_paragrad.engine.step.operations import Block, block_of
from keras_paragrad.engine.step.update import intercept


class VariableGradient(NamedTuple):
    """What a step computes for a variable.

    Attributes:
        variable: The variable.
        number: The gradient's number in the block.
        size: Its bytes.
        of_rows: Whether it has only the rows of the variable that a batch looks up.
        resource: The number of the block's input that the variable is read from, or `None`.
    """

    variable: keras.Variable
    number: int
    size: int
    of_rows: bool
    resource: int | None


class TracedStep(NamedTuple):
    """A traced training step.

    Attributes:
        block: Its operations: forward and backward pass, and update.
        gradients: The gradients that the optimizer is given.
        updates_from: The first operation of the update, of several the last.
        optimizers: Copies of the model's optimizers, built for it without memory.
    """

    block: Block
    gradients: list[VariableGradient]
    updates_from: int
    optimizers: list[Any]


class _Call(NamedTuple):
    graph: Any
    place: int
    pairs: list[tuple[Any, keras.Variable]]


def traced_step(
    model: Any, rows: int, length: int | None = None, optimizer: Any = None, batch: Any = None
) -> TracedStep:
    """Traces what a model's `train_step` does on one device, with the slices of `microbatch`.

    The model is left as it is; compiled metrics are left out. A thread of its own is used, in which no
    strategy is in effect.

    Args:
        model: A compiled and built model.
        rows: The batch size.
        length: The size of axes that the model's inputs leave open.
        optimizer: The optimizer, if not the model's.
        batch: The `tf.TypeSpec` of batches of data; by default they are derived from the model and its loss.

    Raises:
        ValueError: The inputs or targets can't be derived, or an optimizer can't be copied. The message says what to
            write.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_traced, model, rows, length, optimizer, batch).result()


def _traced(model: Any, rows: int, length: int | None, optimizer: Any, data: Any) -> TracedStep:
    with untouched(model, _without_values(model)):
        problems: list[Exception] = []
        for batch in batches(model, rows, length) if data is None else [sized(data, rows, length)]:
            # What a loss raises for targets that it doesn't take may be anything.
            try:
                graph, optimizers, calls = _graph_of(model, batch, optimizer)
            except Exception as error:
                problems.append(error)
            else:
                return _of_graph(graph, rows, optimizers, calls)
        raise ValueError(
            f"The training step of {model.name!r} can't be traced without its data: {problems[0]}"
        ) from problems[0]


def _graph_of(model: Any, batch: Any, optimizer: Any) -> tuple[Any, list[Any], list[_Call]]:
    """The traced step, the optimizers that took part, and their calls."""
    with untouched(model, without_memory()):
        model.__dict__["_compile_metrics"] = None
        optimizers = _replaced_optimizers(model, optimizer)
        calls: list[_Call] = []
        for each in optimizers:
            _record(each, calls)
        graph = tf.function(_step_of(model), autograph=False).get_concrete_function(batch).graph
    # What makes variables is traced a second time.
    return graph, optimizers, [call for call in calls if call.graph is graph]


def _of_graph(graph: Any, rows: int, optimizers: list[Any], calls: list[_Call]) -> TracedStep:
    block, numbers, places = block_of(graph, rows)
    sizes = dict(zip(block.inputs, block.input_sizes, strict=True))
    sizes.update(pair for each in block.operations for pair in zip(each.outputs, each.sizes, strict=True))
    resources = {id(handle): numbers[inside.ref()] for handle, inside in graph.captures}
    gradients = []
    for gradient, variable in (pair for call in calls for pair in call.pairs):
        of_rows = isinstance(gradient, tf.IndexedSlices)
        number = numbers[(gradient.values if of_rows else gradient).ref()]
        resource = resources.get(id(variable.value.handle))
        gradients.append(VariableGradient(variable, number, sizes[number], of_rows, resource))
    # With several optimizers the update of the last one, when all gradients are there.
    last = max((call.place for call in calls), default=-1)
    return TracedStep(block, gradients, places[last], optimizers)


def _step_of(model: Any) -> Callable[[Any], Any]:
    builder = state_of(model).step_builder
    return builder.one_step if isinstance(builder, StepBuilder) and builder.stages.split else model.train_step


def _replaced_optimizers(model: Any, optimizer: Any) -> list[Any]:
    """Puts built copies in the place of the optimizers among a model's attributes, and returns them."""
    given = optimizer or model.optimizer
    model.__dict__["optimizer"] = built_copy(given, model.trainable_variables)
    copies = [model.__dict__["optimizer"]]
    accumulator = accumulating(copies[0])
    if accumulator is not None:
        # How micro-batches are weighted is nothing to advise on here.
        accumulator.weighting = "uniform"
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer) and name != "optimizer":
            # What its own `train_step` gives it is not known before the trace, nor what it was built for.
            model.__dict__[name] = type(value).from_config(value.get_config())
            copies.append(model.__dict__[name])
    return copies


def _record(optimizer: Any, calls: list[_Call]) -> None:
    """Has an optimizer record which gradients it is given, and after how many operations."""

    def recording(apply: Callable, grads: Sequence, trainable_variables: Sequence | None) -> None:
        variables = optimizer.trainable_variables if trainable_variables is None else trainable_variables
        graph = tf.compat.v1.get_default_graph()
        known = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None and v.trainable]
        calls.append(_Call(graph, len(graph.get_operations()), known))
        return apply(grads, trainable_variables)

    intercept(optimizer, recording)


@contextlib.contextmanager
def _without_values(model: Any) -> Iterator[None]:
    """Gives a model's variables stand-ins for values, so that neither replicas nor devices take part."""
    before = [(variable, variable._value) for variable in all_variables(model)]
    try:
        for variable, _ in before:
            variable._value = stand_in(variable.shape, variable._dtype, variable.trainable, variable.name)
        yield
    finally:
        for variable, value in before:
            variable._value = value
