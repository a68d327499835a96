"""`EinsumDense` layers, and so the projections of attention, with and without LoRA."""

import functools
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Pick, RuleCase, register_rule
from keras_paragrad.per_example.rules.linear import Linear, Product, merge_axes
from keras_paragrad.per_example.rules.low_rank import (
    FactorGradient,
    LowRank,
    drop_group_axis,
    lora_factors,
    make_with_lora,
)

# To test the rules with: equations, with the shape of an example, the layer's `output_shape` and its `bias_axes`.
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
_EQUATIONS_WITH_LORA = [
    ("abc,cde->abde", (4, 3), (None, 2, 3), "de"),
    ("abcd,cde->abe", (4, 2, 3), (None, 5), "e"),
    ("abc,bcd->abd", (4, 3), (4, 5), "bd"),
    ("abc,dc->abd", (4, 3), (None, 5), "d"),
    ("abcd,edc->abe", (4, 2, 3), (None, 5), None),
    ("ab,bc->ac", (4,), (3,), None),
    ("...x,xy->...y", (2, 3, 4), 5, "y"),
]


class Axes(NamedTuple):
    """The axes of an einsum, by role.

    Attributes:
        inputs: The input's axes, the batch first.
        kernel: The kernel's axes.
        outputs: The output's axes, the batch first.
        groups: The axes in all three.
        positions: The axes in input and output.
        rows: The axes in input and kernel, which are summed over.
        columns: The axes in kernel and output.
    """

    inputs: str
    kernel: str
    outputs: str
    groups: str
    positions: str
    rows: str
    columns: str

    @classmethod
    def of(cls, equation: str, rank: int = 0) -> "Axes":
        """The axes of an equation, for inputs of rank `rank` if it has an ellipsis."""
        inputs, kernel, outputs = _terms(equation)
        # An ellipsis is one letter for every axis it stands for.
        unused = [letter for letter in string.ascii_letters if letter not in equation]
        elided = "".join(unused[: rank - len(inputs) + 1])
        inputs, outputs = inputs.replace("0", elided), outputs.replace("0", elided)
        return cls(
            inputs,
            kernel,
            outputs,
            groups="".join(axis for axis in kernel if axis in inputs and axis in outputs),
            positions="".join(axis for axis in inputs[1:] if axis in outputs and axis not in kernel),
            rows="".join(axis for axis in kernel if axis in inputs and axis not in outputs),
            columns="".join(axis for axis in kernel if axis in outputs and axis not in inputs),
        )


class LowRankEinsum(LowRank):
    """The kernel is W + s A B, where A has the axes of W but for the last, which B has.

    Only the role of the kernel's last axis matters: the rank takes its place in the input if it is summed over, and
    otherwise in the output.
    """

    formula = "the same, with the axes sorted"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        make, shape = _draw_layer(layer, pick, _EQUATIONS_WITH_LORA)
        return RuleCase(make_with_lora(make, pick([2, 1, 4]), pick([3.0, 2.0])), shape)

    def suits(self, layer: keras.layers.Layer) -> bool:
        if not (_has_roles(layer.equation) and super().suits(layer)):
            return False
        axes = Axes.of(layer.equation)
        return len(axes.kernel) > 1 and axes.kernel[-1] not in axes.groups

    def factor_gradients(self, call: Call) -> tuple[FactorGradient, FactorGradient]:
        """The per-example gradients of LoRA's A and B, as products that aren't computed yet."""
        a, b, scale = lora_factors(call.layer, call.input.dtype)
        axes = Axes.of(call.layer.equation, call.input.shape.rank)
        last = axes.kernel[-1]
        rank = next(letter for letter in string.ascii_letters if letter not in axes.inputs + axes.outputs + axes.kernel)
        sides = (axes.inputs, call.input), (axes.outputs, call.cotangent)
        # The side that has the kernel's last axis, and the other. The narrow one has the rank in place of that axis.
        (with_last, wide), (without, other) = sides if last in axes.inputs else sides[::-1]
        kernel, narrow = (subscripts.replace(last, rank) for subscripts in (axes.kernel, with_last))
        by_b = scale * tf.einsum(f"{with_last},{rank}{last}->{narrow}", wide, b)
        by_a = scale * tf.einsum(f"{without},{kernel}->{narrow}", other, a)

        # A's gradient is the kernel's, for the narrow tensor.
        of_input = (narrow, by_b) if last in axes.inputs else sides[0]
        of_output = sides[1] if last in axes.inputs else (narrow, by_b)
        rows, columns = (subscripts.replace(last, rank) for subscripts in (axes.rows, axes.columns))
        left = _sort_axes(of_input[1], of_input[0], axes.groups, axes.positions, rows)
        right = _sort_axes(of_output[1], of_output[0], axes.groups, axes.positions, columns)
        order = axes.groups + rows + columns
        layout = functools.partial(_unsort_axes, order=order, axes=kernel, shape=call.layer.lora_kernel_a.shape)

        positions = with_last[1:].replace(last, "")
        of_b = Product(_sort_axes(by_a, narrow, "", positions, rank), _sort_axes(wide, with_last, "", positions, last))
        return FactorGradient(Product(left, right), layout), FactorGradient(of_b, drop_group_axis)


@register_rule(keras.layers.EinsumDense)
class EinsumRule(Linear):
    """As for a dense layer, with the axes sorted into groups, positions, rows and columns."""

    formula = r"$\sum_t a_t \delta_t^\top$"
    variants = (LowRankEinsum(),)
    norms_without_gradients = "one position: always; several: where that is cheaper"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return RuleCase(*_draw_layer(layer, pick, _EQUATIONS))

    def suits(self, layer: keras.layers.Layer) -> bool:
        return _has_roles(layer.equation) and super().suits(layer)

    def product(self, call: Call) -> Product:
        axes = Axes.of(call.layer.equation, call.input.shape.rank)
        left = _sort_axes(call.input, axes.inputs, axes.groups, axes.positions, axes.rows)
        right = _sort_axes(call.cotangent, axes.outputs, axes.groups, axes.positions, axes.columns)
        return Product(left, right)

    def kernel(self, layer: keras.layers.Layer, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        axes = Axes.of(layer.equation)
        return _unsort_axes(product, axes.groups + axes.rows + axes.columns, axes.kernel, layer.kernel.shape)


def _draw_layer(
    layer: type[keras.layers.Layer], pick: Pick, equations: Sequence[tuple[Any, ...]]
) -> tuple[Any, tuple[int, ...]]:
    """A function that makes a layer of one of the equations, and the shape of an example."""
    equation, shape, output_shape, axes = pick(equations)
    bias_axes, activation = pick([axes, None]), pick(["tanh", None, "silu"])
    return functools.partial(layer, equation, output_shape, activation, bias_axes), shape


def _has_roles(equation: str) -> bool:
    """Whether each axis has a role in `Axes`: none occurs twice in a term, or in one term alone."""
    inputs, kernel, outputs = _terms(equation)
    distinct = all(len(set(term)) == len(term) for term in (inputs, kernel, outputs))
    # Axes of one operand alone would be summed over in that one.
    paired = set(inputs) | set(kernel) | set(outputs) == (
        set(inputs) & set(kernel) | set(inputs) & set(outputs) | set(kernel) & set(outputs)
    )
    return distinct and paired and inputs[0] == outputs[0] and inputs[0] not in kernel


def _terms(equation: str) -> tuple[str, str, str]:
    """The subscripts of input, kernel and output, with `0` for an ellipsis."""
    inputs, outputs = equation.replace(" ", "").replace("...", "0").split("->")
    inputs, kernel = inputs.split(",")
    return inputs, kernel, outputs


def _sort_axes(tensor: tf.Tensor, axes: str, groups: str, positions: str, others: str) -> tf.Tensor:
    """A tensor with subscripts `axes`, as `(batch, groups, positions, others)`, each merged into one axis."""
    order = axes[0] + groups + positions + others
    tensor = tf.transpose(tensor, [axes.index(axis) for axis in order])
    start = 1 + len(groups)
    tensor = merge_axes(tensor, start + len(positions), len(order))
    tensor = merge_axes(tensor, start, start + len(positions))
    return merge_axes(tensor, 1, start)


def _unsort_axes(product: tf.Tensor, order: str, axes: str, shape: Sequence[int]) -> tf.Tensor:
    """`(..., groups, rows, columns)`, with the axes of `order`, as `(..., *shape)`, with the axes of `axes`."""
    sizes = dict(zip(axes, shape, strict=True))
    split = tf.reshape(product, tf.concat([tf.shape(product)[:-3], [sizes[axis] for axis in order]], 0))
    first = product.shape.rank - 3
    permutation = [*range(first), *(first + order.index(axis) for axis in axes)]
    return tf.ensure_shape(tf.transpose(split, permutation), [*product.shape[:first], *shape])
