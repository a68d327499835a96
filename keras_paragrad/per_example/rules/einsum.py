"""`EinsumDense` layers, and so the projections of attention."""

import functools
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, RuleCase
from keras_paragrad.per_example.rules.einsum_axes import axes_of, is_plain, sorted_axes, unsorted_axes
from keras_paragrad.per_example.rules.linear import Linear, Product
from keras_paragrad.per_example.rules.low_rank_einsum import LowRankEinsum

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


@register_rule(keras.layers.EinsumDense)
class EinsumRule(Linear):
    """The same as a dense layer's, with the axes sorted into groups, positions, rows and columns."""

    formula = r"$\sum_t a_t \delta_t^\top$"
    variants = (LowRankEinsum(),)
    norms_without_gradients = "one position: always; several: where that is cheaper"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        equation, shape, output_shape, axes = pick(_EQUATIONS)
        bias_axes, activation = pick([axes, None]), pick(["tanh", None, "silu"])
        return RuleCase(functools.partial(layer, equation, output_shape, activation, bias_axes), shape)

    def suits(self, layer: Any) -> bool:
        return is_plain(layer.equation) and super().suits(layer)

    def product(self, call: Call) -> Product:
        axes = axes_of(call.layer.equation, call.input.shape.rank)
        left = sorted_axes(call.input, axes.inputs, axes.groups, axes.positions, axes.rows)
        right = sorted_axes(call.cotangent, axes.outputs, axes.groups, axes.positions, axes.columns)
        # XLA finds the shared products too, but sums their squares more slowly than it computes inner products.
        found = call.beside_plain and not call.by_xla and call.input.dtype == call.layer.compute_dtype
        if not (found and axes.are_of_matrices and left.shape.is_fully_defined()):
            return Product(left, right)
        # Written as in the layer and its gradient: otherwise TensorFlow does not deduplicate the operations.
        inputs = tf.reshape(call.input, [-1, *left.shape[2:]])
        outputs = tf.reshape(call.cotangent, [right.shape[0], *right.shape[2:]])
        return Product(tf.reshape(inputs, left.shape), tf.reshape(outputs, right.shape), is_computed=True)

    def columns(self, call: Call) -> list[int]:
        axes = axes_of(call.layer.equation, call.input.shape.rank)
        return [axes.outputs.index(axis) for axis in axes.groups + axes.columns]

    def kernel(self, layer: Any, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        axes = axes_of(layer.equation)
        order = axes.groups + axes.rows + axes.columns
        return unsorted_axes(product, order, axes.kernel, layer.kernel.shape)
