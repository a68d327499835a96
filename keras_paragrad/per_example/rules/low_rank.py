"""Low-rank adapters (LoRA): a frozen weight W plus s A B, where A and B are trained."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Rule, sums_of_biases
from keras_paragrad.per_example.rules.linear import Product, bias_gradients, concatenate_products


class FactorGradient(NamedTuple):
    """The gradient of A or B.

    Attributes:
        product: The gradient, as a sum over positions of outer products.
        layout: Reshapes `(..., groups, rows, columns)` to `(..., *shape)`.
    """

    product: Product
    layout: Callable[[tf.Tensor], tf.Tensor]


class LowRank(Rule, abc.ABC):
    """The base class of rules for layers with Keras's `enable_lora` that multiply by a kernel.

    If W has an example's gradient G, A has s G B' and B has s A' G. With G = sum_t a_t d_t' these are sum_t a_t (s B
    d_t)' and sum_t (s A' a_t) d_t': products as narrow as the rank, and G is never computed. The frozen W may be
    quantized. Hu et al., https://arxiv.org/abs/2106.09685.
    """

    before_activation = True
    norms_without_gradients = "one position: always; several: where that is cheaper"
    configuration = "with LoRA"

    @abc.abstractmethod
    def factor_gradients(self, call: Call) -> tuple[FactorGradient, FactorGradient]:
        """The gradients of A and B."""

    def suits(self, layer: keras.layers.Layer) -> bool:
        return layer.lora_enabled and super().suits(layer)

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        biases = [] if layer.bias is None else [layer.bias]
        return [layer.lora_kernel_a, layer.lora_kernel_b, *biases]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [
            *(concatenated.layout(concatenated.product.gradients()) for concatenated in self._concatenate(calls)),
            *_biases(calls),
        ]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        norms = [concatenated.product.squared_norms(calls[0].by_xla) for concatenated in self._concatenate(calls)]
        return [*norms, *map(tf.square, _biases(calls))]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        moments = [
            concatenated.layout(concatenated.product.second_moment()) for concatenated in self._concatenate(calls)
        ]
        return [*moments, *(tf.reduce_sum(tf.square(bias), 0) for bias in _biases(calls))]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        sums = [
            concatenated.layout(concatenated.product.weighted_sum(weights)) for concatenated in self._concatenate(calls)
        ]
        return [*sums, *sums_of_biases(_biases, calls, weights)]

    def _concatenate(self, calls: Sequence[Call]) -> list[FactorGradient]:
        """The gradients of A and B over all calls, concatenated along the positions."""
        return [
            FactorGradient(concatenate_products([call.product for call in of_calls]), of_calls[0].layout)
            for of_calls in zip(*map(self.factor_gradients, calls), strict=True)
        ]


def lora_factors(layer: keras.layers.Layer, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor, float]:
    """Returns A and B, cast to a dtype, and the scale s."""
    values = [
        tf.cast(tf.convert_to_tensor(factor.value), dtype) for factor in (layer.lora_kernel_a, layer.lora_kernel_b)
    ]
    return values[0], values[1], layer.lora_alpha / layer.lora_rank


def drop_group_axis(product: tf.Tensor) -> tf.Tensor:
    """`(..., 1, rows, columns)` as `(..., rows, columns)`."""
    return tf.squeeze(product, -3)


def make_with_lora(
    make: Callable[..., keras.layers.Layer], rank: int, alpha: float
) -> Callable[[], keras.layers.Layer]:
    """Creates a layer that has LoRA once it is built, for the tests' cases."""
    return lambda: make(lora_rank=rank, lora_alpha=alpha)


def _biases(calls: Sequence[Call]) -> list[tf.Tensor]:
    """The per-example gradients of the bias over all calls, if there is one."""
    layer = calls[0].layer
    if layer.bias is None:
        return []
    return [tf.add_n([bias_gradients(call.cotangent, layer.bias.shape, layer.bias) for call in calls])]
