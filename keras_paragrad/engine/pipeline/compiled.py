"""Compiles a stage of a pipeline with XLA.

A stage runs a *part* of a Functional model: consecutive operations. Tensors are passed by their index among the part's
inputs, or among its outputs.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import (
    ReadScope,
    called_for_training,
    copy_mask,
    current_read_scope,
    mask_of,
    with_mask,
)
from keras_paragrad.compat.model import added_losses_of
from keras_paragrad.engine.step.segments import OperationFn, Part, Tensors

_COMPILED = "_keras_paragrad_compiled_parts"


class _Trace(NamedTuple):
    """Filled in by a trace: indices of outputs, and of inputs that have no mask afterwards, and assigned variables."""

    outputs: list[int]
    unmasked: list[int]
    assigned: list[keras.Variable]


class CompiledPart:
    """Runs a part of a Functional model as a function that XLA compiles, once for all calls in a graph.

    `run` maps the values of the part's inputs, by index, to the values of its outputs; its argument `operation_fn` maps
    each operation to what is called in its place.
    """

    def __init__(self, part: Part, run: Callable[..., dict[int, Any]], name: str):
        self.part, self.run, self.name = part, run, name

    def __call__(self, inputs: Tensors, operation_fn: OperationFn) -> Tensors:
        """Runs the part; see `StageOnDevices`."""
        if tf.executing_eagerly():
            return self.run(inputs, operation_fn=operation_fn)
        graph: Any = tf.compat.v1.get_default_graph()
        # Stored on the graph: all micro-batches share the function compiled for the first.
        if not hasattr(graph, _COMPILED):
            setattr(graph, _COMPILED, {})
        functions = getattr(graph, _COMPILED)
        key = (id(self), tuple(inputs), called_for_training())
        # XLA's program for one device can't read variables on another: their copies are arguments.
        scope = current_read_scope()
        copies = scope.values if scope else []
        if key not in functions:
            functions[key] = self._function(tuple(inputs), [variable for variable, _ in copies], operation_fn)
        function, trace = functions[key]
        masks = [mask_of(value) for value in inputs.values()]
        values, masks, assigned = function(list(inputs.values()), masks, [value for _, value in copies])
        for index in trace.unmasked:
            copy_mask(None, inputs[index])
        for update in zip(trace.assigned, assigned, strict=True):
            assert scope is not None
            scope.add_update(update)
        return {index: with_mask(*pair) for index, *pair in zip(trace.outputs, values, masks, strict=True)}

    def _function(
        self, indices: tuple[int, ...], variables: list[keras.Variable], operation_fn: OperationFn
    ) -> tuple[Callable[..., Any], _Trace]:
        """Makes the function that XLA compiles, and the record that its trace will fill in."""
        trace = _Trace([], [], [])

        def compiled(values: Sequence[tf.Tensor], masks: Sequence[tf.Tensor | None], weights: Sequence[tf.Tensor]):
            inputs = dict(zip(indices, map(with_mask, values, masks), strict=True))
            outer = current_read_scope()
            inner = outer and ReadScope(outer.name, list(zip(variables, weights, strict=True)), outer.reason, once=True)
            before = len(added_losses_of(self.part.layers))
            with inner or contextlib.nullcontext():
                outputs = self.run(inputs, operation_fn=operation_fn)
            self._check(len(added_losses_of(self.part.layers)) > before, inner)
            updates = inner.updates if inner else []
            trace.outputs[:] = outputs
            trace.unmasked[:] = [index for index, value in inputs.items() if mask_of(value) is None]
            trace.assigned[:] = [variable for variable, _ in updates]
            values = list(outputs.values())
            return values, [mask_of(value) for value in values], [value for _, value in updates]

        compiled.__name__ = self.name
        return tf.function(compiled, jit_compile=True, autograph=False), trace

    def _check(self, adds_losses: bool, scope: ReadScope | None) -> None:
        """Refuses layers that XLA's program for one device can't run."""
        if adds_losses or (scope and scope.losses):
            raise ValueError(
                f"A layer of the stage {self.part.name} adds a loss when it is called, which can't leave XLA's "
                "program. Write DistributedFit(Pipeline(...), jit=False)."
            )
        if scope and scope.missing:
            paths = [variable.path for variable in scope.missing.values()]
            raise ValueError(
                f"A layer of the stage {self.part.name} uses {paths}, which is none of the stage's variables, and "
                "XLA's program for one device can't read a variable on another. Write DistributedFit(Pipeline(...), "
                "jit=False), or make it an attribute of the layer."
            )
        operations = tf.compat.v1.get_default_graph().get_operations()
        if any(operation.type in ("While", "StatelessWhile") for operation in operations):
            raise ValueError(
                f"A layer of the stage {self.part.name} computes in a loop, as recurrent ones do, and XLA can't "
                "store a loop's activations for its backward pass. Write DistributedFit(Pipeline(...), jit=False), or "
                "give a recurrent layer unroll=True."
            )
