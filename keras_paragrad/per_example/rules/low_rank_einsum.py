"""`EinsumDense` layers with LoRA, and so the projections of attention."""

import functools
import string
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Pick, RuleCase
from keras_paragrad.per_example.rules.einsum_axes import axes_of, is_plain, sorted_axes, unsorted_axes
from keras_paragrad.per_example.rules.linear import Product
from keras_paragrad.per_example.rules.low_rank import FactorGradient, LowRank, factors, of_matrix, with_lora

# To test the rule with: equations, with the shape of an example, the layer's `output_shape` and its `bias_axes`.
_EQUATIONS = [
    ("abc,cde->abde", (4, 3), (None, 2, 3), "de"),
    ("abcd,cde->abe", (4, 2, 3), (None, 5), "e"),
    ("abc,bcd->abd", (4, 3), (4, 5), "bd"),
    ("abc,dc->abd", (4, 3), (None, 5), "d"),
    ("abcd,edc->abe", (4, 2, 3), (None, 5), None),
    ("ab,bc->ac", (4,), (3,), None),
    ("...x,xy->...y", (2, 3, 4), 5, "y"),
]


class LowRankEinsum(LowRank):
    """The kernel is W + s A B, where A has the axes of W but for the last, which B holds.

    Of the kernel's last axis, only its role matters: the rank takes its place in the input if it is summed over, and
    else in the output.
    """

    formula = "the same, with the axes sorted"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        equation, shape, output_shape, axes = pick(_EQUATIONS)
        bias_axes, activation = pick([axes, None]), pick(["tanh", None, "silu"])
        make = functools.partial(layer, equation, output_shape, activation, bias_axes)
        return RuleCase(with_lora(make, pick([2, 1, 4]), pick([3.0, 2.0])), shape)

    def suits(self, layer: Any) -> bool:
        if not (is_plain(layer.equation) and super().suits(layer)):
            return False
        axes = axes_of(layer.equation)
        return len(axes.kernel) > 1 and axes.kernel[-1] not in axes.groups

    def parts(self, call: Call) -> tuple[FactorGradient, FactorGradient]:
        a, b, scale = factors(call.layer, call.input.dtype)
        axes = axes_of(call.layer.equation, call.input.shape.rank)
        last = axes.kernel[-1]
        rank = next(each for each in string.ascii_letters if each not in axes.inputs + axes.outputs + axes.kernel)
        sides = (axes.inputs, call.input), (axes.outputs, call.cotangent)
        # The side that the last axis is on, and the other.
        (with_last, wide), (without, other) = sides if last in axes.inputs else sides[::-1]
        kernel, narrow = (each.replace(last, rank) for each in (axes.kernel, with_last))
        by_b = scale * tf.einsum(f"{with_last},{rank}{last}->{narrow}", wide, b)
        by_a = scale * tf.einsum(f"{without},{kernel}->{narrow}", other, a)

        of_input = (narrow, by_b) if last in axes.inputs else sides[0]
        of_output = sides[1] if last in axes.inputs else (narrow, by_b)
        rows, columns = (each.replace(last, rank) for each in (axes.rows, axes.columns))
        left = sorted_axes(of_input[1], of_input[0], axes.groups, axes.positions, rows)
        right = sorted_axes(of_output[1], of_output[0], axes.groups, axes.positions, columns)
        order = axes.groups + rows + columns
        layout = functools.partial(unsorted_axes, order=order, axes=kernel, shape=call.layer.lora_kernel_a.shape)

        positions = with_last[1:].replace(last, "")
        factor = Product(
            sorted_axes(by_a, narrow, "", positions, rank), sorted_axes(wide, with_last, "", positions, last)
        )
        return FactorGradient(Product(left, right), layout), FactorGradient(factor, of_matrix)
