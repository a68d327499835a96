"""`EinsumDense` layers, and so the projections of attention."""

import functools
import string
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, RuleCase
from keras_paragrad.per_example.rules.linear import Linear, Product, flattened

# To test the rule with: equations, with the shape of an example, the layer's `output_shape` and its `bias_axes`.
_EQUATIONS = [
    ("abc,cde->abde", (4, 3), (None, 2, 3), "de"),
    ("abcd,cde->abe", (4, 2, 3), (None, 5), "e"),
    ("abc,bcd->abd", (4, 3), (4, 5), "bd"),
    ("abc,bd->adc", (4, 3), (5, 3), "d"),
    ("ab,bc->ac", (4,), (3,), None),
    ("...x,xy->...y", (2, 3, 4), 5, "y"),
    ("acb,bd->adc", (4, 3), (5, 4), "dc"),
    ("abc,cde->abde", (2, 9), (None, 4, 3), "de"),
    ("abc,cde->abde", (2, 9), (None, 4, 3), "e"),
    ("abc,cd->abd", (2, 9), (2, 8), "b"),
]


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


@register_rule(keras.layers.EinsumDense)
class EinsumRule(Linear):
    """The same as a dense layer's, with the axes sorted into groups, positions, rows and columns."""

    formula = r"$\sum_t a_t \delta_t^\top$"
    norms_without_gradients = "one position: always; several: where that is cheaper"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        equation, shape, output_shape, axes = pick(_EQUATIONS)
        bias_axes, activation = pick([axes, None]), pick(["tanh", None, "silu"])
        return RuleCase(functools.partial(layer, equation, output_shape, activation, bias_axes), shape)

    def suits(self, layer: Any) -> bool:
        inputs, kernel, outputs = _terms(layer.equation)
        # Other axes would be summed over in one operand alone.
        plain = all(len(set(term)) == len(term) for term in (inputs, kernel, outputs))
        paired = set(inputs) | set(kernel) | set(outputs) == (
            set(inputs) & set(kernel) | set(inputs) & set(outputs) | set(kernel) & set(outputs)
        )
        batch_first = inputs[0] == outputs[0] and inputs[0] not in kernel
        return plain and paired and batch_first and super().suits(layer)

    def product(self, call: Call) -> Product:
        axes = _axes(call.layer.equation, call.input.shape.rank)
        left = _sorted(call.input, axes.inputs, axes.groups, axes.positions, axes.rows)
        right = _sorted(call.cotangent, axes.outputs, axes.groups, axes.positions, axes.columns)
        # XLA finds the shared products too, but sums their squares more slowly than it computes inner products.
        found = call.beside_plain and not call.by_xla and call.input.dtype == call.layer.compute_dtype
        if not (found and axes.are_of_matrices and left.shape.is_fully_defined()):
            return Product(left, right)
        # Written as in the layer and its gradient: otherwise TensorFlow does not deduplicate the operations.
        inputs = tf.reshape(call.input, [-1, *left.shape[2:]])
        outputs = tf.reshape(call.cotangent, [right.shape[0], *right.shape[2:]])
        return Product(tf.reshape(inputs, left.shape), tf.reshape(outputs, right.shape), is_computed=True)

    def columns(self, call: Call) -> list[int]:
        axes = _axes(call.layer.equation, call.input.shape.rank)
        return [axes.outputs.index(axis) for axis in axes.groups + axes.columns]

    def kernel(self, layer: Any, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        axes = _axes(layer.equation)
        order = axes.groups + axes.rows + axes.columns
        sizes = dict(zip(axes.kernel, layer.kernel.shape, strict=True))
        leading = tf.shape(product)[:-3]
        spread = tf.reshape(product, tf.concat([leading, [sizes[axis] for axis in order]], 0))
        first = product.shape.rank - 3
        places = [first + order.index(axis) for axis in axes.kernel]
        return tf.ensure_shape(
            tf.transpose(spread, [*range(first), *places]), [*product.shape[:first], *layer.kernel.shape]
        )


def _terms(equation: str) -> tuple[str, str, str]:
    inputs, outputs = equation.replace(" ", "").replace("...", "0").split("->")
    inputs, kernel = inputs.split(",")
    return inputs, kernel, outputs


def _axes(equation: str, rank: int = 0) -> Axes:
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


def _sorted(tensor: tf.Tensor, axes: str, groups: str, positions: str, others: str) -> tf.Tensor:
    """`(batch, groups, positions, others)`, each made into one axis."""
    order = axes[0] + groups + positions + others
    tensor = tf.transpose(tensor, [axes.index(axis) for axis in order])
    start = 1 + len(groups)
    tensor = flattened(tensor, start + len(positions), len(order))
    tensor = flattened(tensor, start, start + len(positions))
    return flattened(tensor, 1, start)
