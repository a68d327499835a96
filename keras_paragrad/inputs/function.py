"""The function that is differentiated, from some of a model's inputs to one of its outputs, and its derivative."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.inputs.outputs import Output, select
from keras_paragrad.inputs.refusal import embedding_hint
from keras_paragrad.inputs.selection import Selection


class RowFunction(NamedTuple):
    """Calls the model for inference, with the chosen inputs free and the others fixed.

    Attributes:
        model: The model.
        selection: The inputs that are free.
        output: Selects or computes the output to differentiate.
        fixed: All inputs, in order; the free ones are ignored.
        labels: The label of each row, if the output is selected by labels.
    """

    model: keras.Model
    selection: Selection
    output: Output
    fixed: Sequence[tf.Tensor]
    labels: tf.Tensor | None = None

    def __call__(self, free: Sequence[tf.Tensor]) -> tf.Tensor:
        """The output: a tensor of shape `(rows, ...)`."""
        leaves = list(self.fixed)
        for number, tensor in zip(self.selection.chosen, free, strict=True):
            leaves[number] = tensor
        inputs = keras.tree.pack_sequence_as(self.selection.structure, leaves)
        outputs = self.model(inputs, training=False)
        value = select(self.model, outputs, self.output, self.labels)
        return _checked(value, leaves[0].shape[0])

    def values(self, free: Sequence[tf.Tensor]) -> tf.Tensor:
        """The output if it is a scalar per row: a tensor of shape `(rows,)`."""
        value = self(free)
        if value.shape.num_elements() != value.shape[0]:
            raise ValueError(
                f"The output has shape {(None, *value.shape[1:])}, and a gradient needs one number per row. Write "
                "output=0 for the first entry of its last axis, or a function of the outputs that returns one number "
                "per row, or call input_jacobian()."
            )
        return tf.reshape(value, [-1])

    def connected(self, gradients: Sequence) -> list[tf.Tensor]:
        """The gradients, if the output depends on all the inputs.

        Raises:
            ValueError: It doesn't depend on one, or not differentiably.
        """
        for number, gradient in zip(self.selection.chosen, gradients, strict=True):
            if gradient is None:
                names = self.selection.names
                others = [names[place] for place in self.selection.chosen if place != number]
                hint = embedding_hint(self.model)
                raise ValueError(
                    f"The output does not depend on input {names[number]!r}, or only through operations without a "
                    "derivative, such as rounding or an embedding lookup."
                    + (f" {hint}" if hint else "")
                    + (f" To exclude it, write wrt={others}." if others else "")
                )
        return [tf.convert_to_tensor(gradient) for gradient in gradients]


class Derivative(NamedTuple):
    """The derivative of a chunk of rows.

    Attributes:
        values: A tensor of shape `(rows, ...)` for each free input.
        sound: Whether they passed the checks.
    """

    values: Sequence[tf.Tensor]
    sound: tf.Tensor | bool = True


def _checked(value, rows: int | None) -> tf.Tensor:
    if keras.tree.is_nested(value):
        raise ValueError("`output` returns several tensors. Return one, and call input_jacobian() once for each.")
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        raise ValueError(f"The output has dtype {value.dtype.name}, which has no derivative. Return real numbers.")
    shape = value.shape
    if shape.rank and shape[0] is None:
        value = tf.ensure_shape(value, [rows, *shape[1:]])
    if not value.shape.is_fully_defined() or not value.shape.rank or value.shape[0] != rows:
        raise ValueError(
            f"The output of {rows} rows has shape {shape}, and must have shape ({rows}, ...), with values for each row "
            "that depend on no other row. Keep the first axis: output=lambda y: tf.reduce_sum(y, axis=-1)."
        )
    return value
