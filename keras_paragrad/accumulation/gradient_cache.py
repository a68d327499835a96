"""Gradient caching, for a loss that compares examples: each slice runs forward, and again forward and backward.

Between the two runs, the loss is computed on the outputs of all slices. Its gradients with respect to the outputs, the
*cotangents*, are where the backward passes start.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import ReadScope
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.engine.losses.divisors import Normalizer
from keras_paragrad.engine.losses.sums import LossForm, LossSums, zero_sums
from keras_paragrad.engine.replicas.replica_batch import rows_at, rows_of, static_row_count
from keras_paragrad.engine.step.batch_part import BatchPart, sum_in_loop, weigh
from keras_paragrad.engine.step.gradient import Gradient, StepContext, call_in_function, is_slower_in_loop
from keras_paragrad.engine.step.whole_loss import OutputForm, backward, forward, gradient_of_batch, trace, whole_loss
from keras_paragrad.storage.row_gradients import add_gradients

_NO_LOSSES = LossForm((), (), (), proportional=False)
# The variables that a forward pass assigns, such as seeds and moving averages, with their new values.
_State = Sequence[tuple[keras.Variable, tf.Tensor]]
_Inputs = TypeVar("_Inputs")
_Outputs = TypeVar("_Outputs")


class _FirstRun(NamedTuple):
    """What the first run of a slice returns: the tensors of `forward`, their layout, and the state after it."""

    tensors: list[tf.Tensor]
    form: OutputForm
    state: _State


class GradientCache:
    """Computes a batch's gradient in slices, each of which runs twice: for its outputs, and for the gradient.

    The first runs assign no variable: each gets the state that the run before it returned. So the second runs draw the
    same random numbers, and the model's state changes once.

    Args:
        context: The context of the batch.
        size: The number of examples in a slice; the last one of a batch may have fewer.
    """

    def __init__(self, context: StepContext, size: int):
        self.context, self.model, self.size = context, context.model, size

    def __call__(self, data: Batch) -> Gradient:
        """The gradient of a batch."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        static = static_row_count(x)
        rows = rows_of(x) if static is None else static
        # The number of slices in the loop. The last slice has a separate graph, unless it is known to be as large.
        looped = -(-rows // self.size) - 1 if static is None else rows // self.size
        has_rest = static is None or static % self.size
        last = rows_at(x, looped * self.size, rows - looped * self.size) if has_rest else None
        tensors, form = (self._eager_outputs if tf.executing_eagerly() else self._outputs)(x, looped, last)
        whole = whole_loss(self.context, data, tensors, form)

        def compute(index: tf.Tensor) -> BatchPart:
            first = index * self.size
            cotangents = rows_at(whole.cotangents, first, self.size)
            return self._backward(rows_at(x, first, self.size), cotangents, in_loop=True)

        total = sum_in_loop(self.model, looped, compute)
        if last is not None:
            first = looped * self.size
            total += self._backward(last, rows_at(whole.cotangents, first, rows - first))
        gradients = self.context.replica_batch.gradients(total.finish().gradients)
        # Before any weight is updated: in optimized graphs, the backward pass of the last slice may otherwise read an
        # updated one.
        return gradient_of_batch(self.context, tf.tuple(list(map(add_gradients, gradients, whole.gradients))), whole)

    def _outputs(self, x: Structure, looped: tf.Tensor | int, last: Structure) -> tuple[list[tf.Tensor], OutputForm]:
        """Runs all slices for the first time; returns the tensors of `forward` for the whole batch, and their layout.

        Args:
            x: The inputs of the batch.
            looped: The number of slices in the loop.
            last: The inputs of the slice after the loop, or `None`.
        """
        # Never runs: gives the shapes of the tensors, and the variables that a slice assigns.
        first = trace(self.model, lambda: self._forward(rows_at(x, 0, self.size), []))
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in first.tensors]
        assigned = [variable for variable, _ in first.state]
        arrays = [tf.TensorArray(spec.dtype, looped, element_shape=spec.shape) for spec in specs]

        def add(
            index: tf.Tensor, values: list[tf.Tensor], arrays: list[tf.TensorArray]
        ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.TensorArray]]:
            part = rows_at(x, index * self.size, self.size)
            run = self._forward(part, list(zip(assigned, values, strict=True)), in_loop=True)
            arrays = [array.write(index, tensor) for array, tensor in zip(arrays, run.tensors, strict=True)]
            return index + 1, [value for _, value in run.state], arrays

        start = tf.constant(0), [tf.identity(variable.value) for variable in assigned], arrays
        _, values, arrays = tf.while_loop(lambda index, *_: index < looped, add, start, parallel_iterations=1)
        if last is None:
            return [_join(array.stack()) for array in arrays], first.form
        tensors = self._forward(last, list(zip(assigned, values, strict=True))).tensors

        def all_rows(array: tf.TensorArray, spec: tf.TensorSpec, tensor: tf.Tensor) -> tf.Tensor:
            if spec.shape.is_fully_defined():
                return tf.concat([_join(array.stack()), tensor], 0)
            # The shape of an empty array's elements is unknown.
            nothing = tf.zeros(tf.concat([[looped, self.size], tf.shape(tensor)[1:]], 0), tensor.dtype)
            return tf.concat([_join(tf.cond(looped > 0, array.stack, lambda: nothing)), tensor], 0)

        return [all_rows(*arguments) for arguments in zip(arrays, specs, tensors, strict=True)], first.form

    def _eager_outputs(
        self, x: Structure, looped: tf.Tensor | int, last: Structure
    ) -> tuple[list[tf.Tensor], OutputForm]:
        """`_outputs`, in a Python loop."""
        slices = [rows_at(x, index * self.size, self.size) for index in range(int(looped))]
        runs: list[_FirstRun] = []
        for piece in slices if last is None else [*slices, last]:
            runs.append(self._forward(piece, runs[-1].state if runs else []))
        return [tf.concat(pieces, 0) for pieces in zip(*(run.tensors for run in runs), strict=True)], runs[-1].form

    def _forward(self, x: Structure, state: _State, *, in_loop: bool = False) -> _FirstRun:
        """Runs a slice for the first time, with variables read from `state`."""

        def run(x: Structure) -> _FirstRun:
            reason = "its two runs in a step must use the same weights"
            with ReadScope(self.model.name, state, reason) as scope:
                return _FirstRun(*forward(self.model, x), scope.updates)

        return self._call(run, x, in_loop=in_loop)

    def _backward(self, x: Structure, cotangents: list[tf.Tensor | None], *, in_loop: bool = False) -> BatchPart:
        """Runs a slice for the second time; returns its share of the batch's gradient."""
        gradients = self._call(lambda inputs: backward(self.model, *inputs), (x, cotangents), in_loop=in_loop)
        # The loss of the whole batch has been divided already, so the slices' gradients are only added. Its value is
        # known too: slices add no losses.
        weight, losses = Normalizer(tf.constant(1.0), summed=True), LossSums(zero_sums(self.model), _NO_LOSSES)
        return BatchPart(self.model, weigh(self.model, gradients), weight, losses)

    def _call(self, run: Callable[[_Inputs], _Outputs], inputs: _Inputs, *, in_loop: bool) -> _Outputs:
        """Runs a slice, in a separate function if XLA compiles it or if that is faster in a loop."""
        if self.context.by_xla or (in_loop and is_slower_in_loop(self.model)):
            return call_in_function(run, inputs, by_xla=self.context.by_xla)
        return run(inputs)


def _join(stacked: tf.Tensor) -> tf.Tensor:
    """Reshapes `(slices, size, ...)` to `(slices * size, ...)`."""
    shape = tf.shape(stacked)
    joined = tf.reshape(stacked, tf.concat([[shape[0] * shape[1]], shape[2:]], 0))
    return tf.ensure_shape(joined, [None, *stacked.shape[2:]])
