"""The axes of `EinsumDense` equations, by role, and tensors sorted by them."""

import string
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_paragrad.per_example.rules.linear import flattened


class Axes(NamedTuple):
    """The axes of an einsum, by role.

    Attributes:
        inputs: The input's axes, the batch first.
        kernel: The kernel's axes.
        outputs: The output's axes, the batch first.
        groups: Those in all three.
        positions: Those in input and output.
        rows: Those in input and kernel, which are summed over.
        columns: Those in kernel and output.
    """

    inputs: str
    kernel: str
    outputs: str
    groups: str
    positions: str
    rows: str
    columns: str

    @property
    def are_of_matrices(self) -> bool:
        """Whether Keras multiplies one matrix per example by one kernel matrix.

        If so, the plain gradient is a batched matmul summed over the batch.
        """
        in_order = self.inputs[1:] == self.positions + self.rows and self.outputs[1:] == self.positions + self.columns
        sizes = len(self.positions), len(self.rows), len(self.columns)
        return in_order and sizes in ((1, 1, 1), (1, 1, 2), (1, 2, 1))


def is_plain(equation: str) -> bool:
    """Whether an equation sorts into the roles of `Axes`: no axis twice in a term, or in one term alone."""
    inputs, kernel, outputs = _terms(equation)
    # Other axes would be summed over in one operand alone.
    plain = all(len(set(term)) == len(term) for term in (inputs, kernel, outputs))
    paired = set(inputs) | set(kernel) | set(outputs) == (
        set(inputs) & set(kernel) | set(inputs) & set(outputs) | set(kernel) & set(outputs)
    )
    return plain and paired and inputs[0] == outputs[0] and inputs[0] not in kernel


def _terms(equation: str) -> tuple[str, str, str]:
    inputs, outputs = equation.replace(" ", "").replace("...", "0").split("->")
    inputs, kernel = inputs.split(",")
    return inputs, kernel, outputs


def axes_of(equation: str, rank: int = 0) -> Axes:
    inputs, kernel, outputs = _terms(equation)
    # An ellipsis is one letter for every axis it stands for.
    free = [letter for letter in string.ascii_letters if letter not in equation]
    elided = "".join(free[: rank - len(inputs) + 1])
    inputs, outputs = inputs.replace("0", elided), outputs.replace("0", elided)
    return Axes(
        inputs,
        kernel,
        outputs,
        groups="".join(axis for axis in kernel if axis in inputs and axis in outputs),
        positions="".join(axis for axis in inputs[1:] if axis in outputs and axis not in kernel),
        rows="".join(axis for axis in kernel if axis in inputs and axis not in outputs),
        columns="".join(axis for axis in kernel if axis in outputs and axis not in inputs),
    )


def sorted_axes(tensor: tf.Tensor, axes: str, groups: str, positions: str, others: str) -> tf.Tensor:
    """`(batch, groups, positions, others)`, each made into one axis."""
    order = axes[0] + groups + positions + others
    tensor = tf.transpose(tensor, [axes.index(axis) for axis in order])
    start = 1 + len(groups)
    tensor = flattened(tensor, start + len(positions), len(order))
    tensor = flattened(tensor, start, start + len(positions))
    return flattened(tensor, 1, start)


def unsorted_axes(product: tf.Tensor, order: str, axes: str, shape: Sequence[int]) -> tf.Tensor:
    """`(..., groups, rows, columns)`, with the axes of `order`, as `(..., *shape)`, with those of `axes`."""
    sizes = dict(zip(axes, shape, strict=True))
    spread = tf.reshape(product, tf.concat([tf.shape(product)[:-3], [sizes[axis] for axis in order]], 0))
    first = product.shape.rank - 3
    places = [first + order.index(axis) for axis in axes]
    return tf.ensure_shape(tf.transpose(spread, [*range(first), *places]), [*product.shape[:first], *shape])
