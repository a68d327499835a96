"""Runs a stage of a pipeline on its devices, forward and backward.

A stage runs a *part* of a Functional model: consecutive operations. Column c has device c of each stage.

for micro-batch i = 0, 1, ...: for each stage: run its part on the device of column i modulo the number of columns
each column reads copies of the stage's variables, which are made once per batch; gradients flow back to the variables
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import (
    ReadScope,
    called_for_training,
    copy_mask,
    current_read_scope,
    dense_parts,
    full_precision,
    has_gradient,
    mask_of,
    may_be_differentiated,
    pack_dense_parts,
    with_mask,
)
from keras_paragrad.compat.model import added_losses_of
from keras_paragrad.compat.private import record_operation_backprop_only, stop_recording
from keras_paragrad.engine.step.gradient import in_function
from keras_paragrad.engine.step.segments import OperationFn, Part, Tensors
from keras_paragrad.engine.trials.trial import is_trial

# Profiles attribute operations, and XLA's programs, to stages by these names.
STAGE = "pipeline_stage_{stage}_column_{column}"
_SCOPE = STAGE + "_micro_batch_{micro_batch}"
# Runs a part: maps the values of inputs, by index, to the values of outputs. The argument `operation_fn` maps each
# operation to what is called in its place.
Run = Callable[..., Tensors]
_REMOTE_WEIGHT = (
    "its device is not the one that this micro-batch is computed on. Name one device for each stage, as in "
    'devices=["GPU:0", "GPU:1"].'
)


class Columns:
    """The current micro-batch, and the copies of variables that a batch's micro-batches share.

    A variable is on its stage's first device. Each batch copies it once to each of the stage's other devices.
    """

    def __init__(self):
        # The index of the micro-batch that is being computed. Modulo the number of columns, it is the column.
        self.micro_batch = 0
        # For a variable's `id` and a device: the graph in which a copy was made, and the copy. `None` between batches.
        self._copies: dict[tuple[int, str], tuple[tf.Graph | None, tf.Tensor]] | None = None

    @contextlib.contextmanager
    def batch(self) -> Generator[None]:
        """Context of one batch, between two updates."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies, self.micro_batch = None, 0

    def copy(self, variable: keras.Variable, device: str) -> tf.Tensor:
        """A variable's value on a device. The value's gradient flows to the variable."""
        with full_precision():
            value = tf.convert_to_tensor(variable.value)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        copies = {} if self._copies is None else self._copies
        copy = copies.get((id(variable), device))
        with stop_recording(), tf.device(device):
            if copy is None or copy[0] is not graph:
                copy = copies[id(variable), device] = graph, tf.identity(value)
            # Each micro-batch needs its own tensor.
            result = tf.identity(copy[1])
        # `tf.custom_gradient` would copy the value to the device again for the backward pass.
        record_operation_backprop_only("Identity", [result], [value], lambda gradient: [gradient])
        return result


class StageOnDevices:
    """Runs a stage on one of its devices, forward and backward.

    TensorFlow places a layer's operations by `tf.device`, but a tape's operations for the backward pass on the default
    device. So each stage is differentiated by its own tape, on its device. `runs` maps each device to a function that
    runs the part. Variables are on the first device, and `owner` gets the losses that layers add on other devices.
    """

    def __init__(self, part: Part, index: int, runs: dict[str, Run], columns: Columns, owner: keras.Model):
        self.part, self.index, self.runs, self.columns, self.owner = part, index, runs, columns, owner
        self.devices = list(runs)

    def __call__(self, inputs: Tensors, operation_fn: OperationFn) -> Tensors:
        """Maps the values of the stage's inputs, by index, to the values of its outputs."""
        # In a trial, weights are tensors, which the stage's tape wouldn't watch.
        differentiated = may_be_differentiated() and not is_trial()
        column = self.columns.micro_batch % len(self.devices) if differentiated else 0
        device = self.devices[column]
        scope = _SCOPE.format(stage=self.index, column=column, micro_batch=self.columns.micro_batch)
        with tf.device(device), tf.name_scope(scope):
            if not differentiated:
                return self.runs[device](inputs, operation_fn=operation_fn)
            return _StageCall(self, inputs, device, remote=column > 0)(operation_fn)


class _StageCall:
    """A call of a stage, differentiated by its own tape. `remote`: the variables are on another device."""

    def __init__(self, stage: StageOnDevices, inputs: Tensors, device: str, *, remote: bool):
        self.stage, self.inputs, self.device, self.remote = stage, inputs, device, remote
        # The inputs, some of them sparse or ragged; their dense tensors; and the indices of those with a gradient.
        self.leaves = list(inputs.values())
        self.tensors = [part for leaf in self.leaves for part in dense_parts(leaf)]
        self.indices = [index for index, tensor in enumerate(self.tensors) if has_gradient(tensor)]
        variables = (
            {id(variable): variable for layer in stage.part.layers for variable in layer.variables} if remote else {}
        )
        self.weights = [variable for variable in variables.values() if variable.trainable]
        self.state = [variable for variable in variables.values() if not variable.trainable]

    def __call__(self, operation_fn: OperationFn) -> Tensors:
        # `run` may return only tensors that have a gradient. It fills these with the rest.
        outputs: Tensors = {}
        scopes: list[ReadScope] = []

        @tf.custom_gradient
        def run(*arguments: tf.Tensor):
            with tf.GradientTape(persistent=True) as tape:
                # Two inputs may be the same tensor, and an output may be an input: each has its own gradient.
                sources = [tf.identity(argument) for argument in arguments]
                tape.watch(sources)
                inputs = self._with_inputs(sources)
                with self._reading(sources[len(self.indices) :]) as scope:
                    scopes[:] = [scope] if scope else []
                    outputs.update(self.stage.runs[self.device](inputs, operation_fn=operation_fn))
                for index, leaf in self.inputs.items():
                    # Attention removes the masks of its inputs: remove them for other stages too.
                    copy_mask(inputs[index], leaf)
                parts = [part for leaf in outputs.values() for part in dense_parts(leaf)]
                targets = [part for part in parts if has_gradient(part)] + (scope.losses if scope else [])

            def gradient(*cotangents: Any, variables: Sequence[tf.Variable] = ()) -> Any:
                with tf.device(self.device):
                    gradients = tape.gradient(targets, [*sources, *variables], list(cotangents))
                of_sources, of_variables = gradients[: len(sources)], gradients[len(sources) :]
                return (of_sources, of_variables) if variables else of_sources

            return targets, gradient

        copies = [self.stage.columns.copy(variable, self.device) for variable in self.weights]
        tensors: Any = run(*(self.tensors[index] for index in self.indices), *copies)
        returned = iter(tensors)
        results = list(outputs.values())
        parts = [[next(returned) if has_gradient(part) else part for part in dense_parts(result)] for result in results]
        for loss in returned:
            # Not `owner.add_loss`: a Functional model refuses it.
            keras.layers.Layer.add_loss(self.stage.owner, loss)
        for variable, value in [update for scope in scopes for update in scope.updates]:
            variable.assign(value)
        return dict(zip(outputs, pack_dense_parts(results, parts), strict=True))

    def _with_inputs(self, sources: Sequence[tf.Tensor]) -> Tensors:
        """The inputs, with differentiable tensors replaced by `sources`, after which sources of weights may follow."""
        replaced = list(self.tensors)
        for index, tensor in zip(self.indices, sources, strict=False):
            replaced[index] = tensor
        remaining = iter(replaced)
        parts = [[next(remaining) for _ in dense_parts(leaf)] for leaf in self.leaves]
        return dict(zip(self.inputs, pack_dense_parts(self.leaves, parts), strict=True))

    def _reading(self, weights: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[ReadScope | None]:
        """Context in which layers read copies of variables that are on another device."""
        if not self.remote:
            return contextlib.nullcontext()
        with full_precision():
            state = [tf.identity(tf.convert_to_tensor(variable.value)) for variable in self.state]
        values = [*zip(self.weights, weights, strict=True), *zip(self.state, state, strict=True)]
        return ReadScope(self.stage.part.name, values, _REMOTE_WEIGHT, once=True)


_COMPILED = "_keras_paragrad_compiled_parts"


class CompiledPart:
    """Runs a part as a function that XLA compiles once for all calls in a graph. `run` is a `Run`."""

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
        # XLA compiles for one device, and can't read variables on another one. So copies of them are arguments.
        scope = current_read_scope()
        copies = scope.values if scope else []
        if key not in functions:
            variables = [variable for variable, _ in copies]
            run = functools.partial(self._run, tuple(inputs), variables, operation_fn)
            functions[key] = in_function(run, name=self.name)
        masks = [mask_of(value) for value in inputs.values()]
        outputs, unmasked, updates = functions[key]((list(inputs.values()), masks, [value for _, value in copies]))
        for index in unmasked:
            copy_mask(None, inputs[index])
        for update in updates:
            assert scope is not None
            scope.add_update(update)
        return outputs

    def _run(
        self, indices: tuple[int, ...], variables: list[keras.Variable], operation_fn: OperationFn, given: Any
    ) -> tuple[Tensors, list[int], list[tuple[keras.Variable, tf.Tensor]]]:
        """Runs the part. Returns outputs, the indices of inputs without a mask afterwards, and assigned variables."""
        values, masks, weights = given
        inputs = dict(zip(indices, map(with_mask, values, masks), strict=True))
        outer = current_read_scope()
        inner = outer and ReadScope(outer.name, list(zip(variables, weights, strict=True)), outer.reason, once=True)
        before = len(added_losses_of(self.part.layers))
        with inner or contextlib.nullcontext():
            outputs = self.run(inputs, operation_fn=operation_fn)
        self._check(len(added_losses_of(self.part.layers)) > before, inner)
        unmasked = [index for index, value in inputs.items() if mask_of(value) is None]
        return outputs, unmasked, inner.updates if inner else []

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
