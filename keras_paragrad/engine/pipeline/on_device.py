"""A part of a model that runs on one device, forward and backward."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import copy_mask, full_precision, may_be_differentiated
from keras_paragrad.compat.leaves import dense_parts, has_gradient, rebuilt
from keras_paragrad.engine.pipeline.columns import Columns
from keras_paragrad.engine.step.reads import Reads
from keras_paragrad.engine.step.segments import Part

# By their names a profile tells which stage operations, and what XLA compiles, belong to.
STAGE = "pipeline_stage_{stage}_column_{column}"
SCOPE = STAGE + "_micro_batch_{micro_batch}"
# From the values of a part's inputs, by their places among them, to those of its outputs.
Run = Callable[..., dict[int, Any]]
_WHY = (
    "its device is not the one that this micro-batch is computed on. Name one device for each stage, as in "
    'devices=["GPU:0", "GPU:1"].'
)


class OnDevice:
    """Runs a part of a Functional model on one of its devices, and its backward pass too.

    TensorFlow puts what a layer computes where `tf.device` says, but what a tape adds to a graph for the backward pass
    goes to the default device. So a part is differentiated by itself, on its device.

    Args:
        part: The part.
        index: Which stage of the model it is, counted from 0.
        runs: For each of its devices, by name, what runs the part. Variables are on the first.
        columns: Says which micro-batch is computed: they take turns on the devices.
        owner: The model, to which losses are added that layers add on other devices than the first.
    """

    def __init__(self, part: Part, index: int, runs: dict[str, Run], columns: Columns, owner: keras.Model):
        self.part, self.index, self.runs, self.columns, self.owner = part, index, runs, columns, owner
        self.devices = list(runs)

    def __call__(self, known: dict[int, Any], operation_fn: Callable[..., Any]) -> dict[int, Any]:
        """Runs it.

        Args:
            known: The values of its inputs, by their places among them.
            operation_fn: What Keras calls in place of an operation.

        Returns:
            The values of its outputs, by their places.
        """
        column = self.columns.micro_batch % len(self.devices) if may_be_differentiated() else 0
        device = self.devices[column]
        scope = SCOPE.format(stage=self.index, column=column, micro_batch=self.columns.micro_batch)
        with tf.device(device), tf.name_scope(scope):
            if not may_be_differentiated():
                return self.runs[device](known, operation_fn=operation_fn)
            return _Differentiated(self, known, device, away=column > 0)(operation_fn)


class _Differentiated:
    """One call of a part, differentiated by itself.

    Args:
        stage: The part, with its devices.
        known: The values of its inputs.
        device: The device that it is run on.
        away: Whether the part's variables are on another device.
    """

    def __init__(self, stage: OnDevice, known: dict[int, Any], device: str, *, away: bool):
        self.stage, self.known, self.device, self.away = stage, known, device, away
        self.leaves = list(known.values())
        self.tensors = [part for leaf in self.leaves for part in dense_parts(leaf)]
        self.places = [place for place, tensor in enumerate(self.tensors) if has_gradient(tensor)]
        variables = {id(each): each for layer in stage.part.layers for each in layer.variables} if away else {}
        self.weights = [variable for variable in variables.values() if variable.trainable]
        self.state = [variable for variable in variables.values() if not variable.trainable]

    def __call__(self, operation_fn: Callable[..., Any]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        opened: list[Reads] = []

        @tf.custom_gradient
        def placed(*arguments):
            with tf.GradientTape(persistent=True) as tape:
                # Two inputs may be the same tensor, and an output may be an input: each has a gradient of its own.
                watched = [tf.identity(each) for each in arguments]
                tape.watch(watched)
                inputs = self._inputs(watched)
                with self._reading(watched[len(self.places) :]) as reads:
                    opened[:] = [reads] if reads else []
                    found.update(self.stage.runs[self.device](inputs, operation_fn=operation_fn))
                for place, leaf in self.known.items():
                    # Attention takes masks off its inputs: other stages find these as they would without stages.
                    copy_mask(inputs[place], leaf)
                outputs = _differentiable(found, reads)

            def gradient(*cotangents: Any, variables: Any = ()) -> Any:
                with tf.device(self.device):
                    gradients = tape.gradient(outputs, [*watched, *variables], list(cotangents))
                own, of_variables = gradients[: len(watched)], gradients[len(watched) :]
                return (own, of_variables) if variables else own

            return outputs, gradient

        copies = [self.stage.columns.copy(variable, self.device) for variable in self.weights]
        returned: Any = placed(*(self.tensors[place] for place in self.places), *copies)
        passed = iter(returned)
        results = list(found.values())
        parts = [[next(passed) if has_gradient(part) else part for part in dense_parts(each)] for each in results]
        for loss in passed:
            # Not `owner.add_loss`: a Functional model refuses it.
            keras.layers.Layer.add_loss(self.stage.owner, loss)
        for variable, value in [update for reads in opened for update in reads.updates]:
            variable.assign(value)
        return dict(zip(found, rebuilt(results, parts), strict=True))

    def _inputs(self, watched: Sequence[tf.Tensor]) -> dict[int, Any]:
        replaced = list(self.tensors)
        for place, tensor in zip(self.places, watched, strict=False):
            replaced[place] = tensor
        remaining = iter(replaced)
        parts = [[next(remaining) for _ in dense_parts(leaf)] for leaf in self.leaves]
        return dict(zip(self.known, rebuilt(self.leaves, parts), strict=True))

    def _reading(self, weights: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Reads | None]:
        """Where variables are on another device, the context in which layers read their copies."""
        if not self.away:
            return contextlib.nullcontext()
        with full_precision():
            state = [tf.identity(tf.convert_to_tensor(variable.value)) for variable in self.state]
        values = [*zip(self.weights, weights, strict=True), *zip(self.state, state, strict=True)]
        return Reads(self.stage.part.name, values, _WHY, once=True)


def _differentiable(found: dict[int, Any], reads: Reads | None) -> list[tf.Tensor]:
    parts = [part for leaf in found.values() for part in dense_parts(leaf)]
    return [part for part in parts if has_gradient(part)] + (reads.losses if reads else [])
