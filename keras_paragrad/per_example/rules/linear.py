"""Linear maps: sums over positions of outer products, for dense, einsum and convolution layers.

Ghost norms are norms of gradients computed from inner products of positions, without the gradients themselves.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Factors, Rule, squared_norm, sums_of_biases, weighted_sum, zeroed
from keras_paragrad.sums import row_sums

# Without XLA, ghost norms are computed where they take less than 1 / GHOST_PENALTY of the multiplications, since
# gradients that norms have computed are cheap to sum. On two cores, norms and sums of 128 examples in milliseconds, by
# gradients and by ghost norms: 25 positions of 256 and 32, 1.5 and 1.8; 64 of 128 and 256, 4.9 and 7.1; 36 of 288 and
# 64, whose gradients are 1.45 times as large as both factors, 2.4 and 3.2; but 64 of 1152 and 128, 1.8 times as large,
# 22.8 and 22.5, and norms alone 19.8 and 10.5.
GHOST_PENALTY = 1.5


class Product(NamedTuple):
    """A weight's gradient as a sum over positions of outer products, `left[b, g, t, :] x right[b, g, t, :]`.

    Attributes:
        left: `(batch, groups, positions, rows)`.
        right: `(batch, groups, positions, columns)`.
    """

    left: tf.Tensor
    right: tf.Tensor

    def is_ghost(self, by_xla: bool = False) -> bool:
        """Whether ghost norms are cheaper than norms of the computed gradients."""
        left: Any = self.left.shape
        _, _, positions, rows = left
        columns: Any = self.right.shape[3]
        penalty = 1.0 if by_xla else GHOST_PENALTY
        return positions == 1 or (positions is not None and penalty * positions * (rows + columns) <= rows * columns)

    @property
    def is_smaller_than_gradients(self) -> bool:
        """Whether the two factors take less memory than the gradients."""
        left: Any = self.left.shape
        _, _, positions, rows = left
        columns: Any = self.right.shape[3]
        return positions is not None and positions * (rows + columns) < rows * columns

    def gradients(self) -> tf.Tensor:
        """Each example's gradient, `(batch, groups, rows, columns)`."""
        return _matmul(self.left, self.right, transpose_a=True, grad_b=True)

    def squared_norms(self, by_xla: bool = False) -> tf.Tensor:
        """The squared norm of each example's gradient, `(batch,)`."""
        if self.is_ghost(by_xla):
            return row_sums(self._inner_products(self.left, by_xla) * self._inner_products(self.right, by_xla), by_xla)
        return squared_norm(self._maybe_transposed_gradients(by_xla)[0], by_xla)

    def sum_of_gradients(self, weights: tf.Tensor, by_xla: bool = False) -> tf.Tensor:
        """The sum over examples of gradients times `weights` `(batch,)`, reusing the gradients computed for norms.

        Gradients of weight 0 may be non-finite.
        """
        gradients, transposed = self._maybe_transposed_gradients(by_xla)

        def sum_zeroed() -> tf.Tensor:
            return weighted_sum(weights, zeroed(gradients, weights), by_xla)

        if by_xla:
            return sum_zeroed()
        total = weighted_sum(weights, gradients)
        # Usually all are finite, and then nothing is copied.
        total = tf.cond(tf.reduce_all(tf.math.is_finite(total)), lambda: total, sum_zeroed)
        return tf.transpose(total, [0, 2, 1]) if transposed else total

    def _maybe_transposed_gradients(self, by_xla: bool) -> tuple[tf.Tensor, bool]:
        """The per-example gradients, and whether they are transposed, which doesn't matter for norms."""
        # Without XLA, products with the wider factor last are faster.
        transposed = not by_xla and (self.left.shape[3] or 0) > (self.right.shape[3] or 0)
        if not transposed:
            return self.gradients(), False
        return _matmul(self.right, self.left, transpose_a=True), True

    def _inner_products(self, side: tf.Tensor, by_xla: bool) -> tf.Tensor:
        """A factor's inner products between positions, `(batch, groups, positions, positions)`."""
        sizes: Any = side.shape
        _, groups, positions, columns = sizes
        # With one position, they are squared norms.
        if positions != 1:
            return _matmul(side, side, transpose_b=True)
        return tf.reshape(squared_norm(tf.reshape(side, [-1, columns]), by_xla), [-1, groups, 1, 1])

    def second_moment(self) -> tf.Tensor:
        """The sum over examples of squared gradients, `(groups, rows, columns)`."""
        if self.left.shape[2] == 1:
            return Product(tf.square(self.left), tf.square(self.right)).sum()
        return tf.reduce_sum(tf.square(self.gradients()), 0)

    def sum(self) -> tf.Tensor:
        """The sum over examples, `(groups, rows, columns)`."""
        if self.left.shape[1] == 1:
            # A plain matmul is faster than a batched one of batch size 1.
            left, right = (tf.reshape(side, [-1, side.shape[3]]) for side in (self.left, self.right))
            return tf.matmul(left, right, transpose_a=True)[tf.newaxis]
        left, right = (tf.transpose(side, [1, 0, 2, 3]) for side in (self.left, self.right))
        groups = tf.shape(left)[0]
        left, right = (tf.reshape(side, [groups, -1, side.shape[3]]) for side in (left, right))
        return tf.matmul(left, right, transpose_a=True)

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        """The sum over examples times `weights` `(batch,)`, `(groups, rows, columns)`."""
        return Product(self.left, self.right * tf.reshape(weights, [-1, 1, 1, 1])).sum()


class Linear(Rule, abc.ABC):
    """The base class of rules for layers that multiply by a kernel and may add a bias.

    With inputs a and cotangents d at positions t, an example's gradient is g = sum_t a_t d_t'. |g|^2 is computed from
    g, or as sum_ts (a_t'a_s)(d_t'd_s) without materializing g.
    Goodfellow, https://arxiv.org/abs/1510.01799 (one position); Li et al., https://arxiv.org/abs/2110.05679 (several);
    Bu et al., https://arxiv.org/abs/2205.10683 (which of the two).
    """

    before_activation = True

    @abc.abstractmethod
    def product(self, call: Call) -> Product:
        """The kernel gradient of a call, in factored form."""

    @abc.abstractmethod
    def kernel(self, layer: keras.layers.Layer, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        """Reshapes `(..., groups, rows, columns)` to the kernel's layout `(..., *kernel.shape)`."""

    def bias_shape_in_output(self, layer: keras.layers.Layer, rank: int) -> Sequence[int]:
        """The shape in which the layer adds its bias to outputs of rank `rank`."""
        return layer.bias.shape

    def kernel_sum(self, call: Call, weights: tf.Tensor) -> tf.Tensor:
        """The sum over examples of the kernel's gradients times `weights` `(batch,)`, in the kernel's shape."""
        return self.kernel(call.layer, self.product(call).weighted_sum(weights), call.by_xla)

    def folded(self, calls: Sequence[Call]) -> tf.Tensor | None:
        """The per-example kernel gradients `(batch, *shape)` from `folded.py`, or `None` if the product is cheaper."""
        return None

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        return [layer.kernel] if layer.bias is None else [layer.kernel, layer.bias]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        kernel, *biases = self.gradients_to_keep(calls)
        return [Factors.of(kernel).materialized(), *biases]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        folded = self.folded(calls)
        if folded is not None:
            return [folded, *self._biases(calls)]
        product = self._concatenate(calls)
        kernel = Factors([product.left, product.right], _KernelLayout(self, calls[0].layer, calls[0].by_xla))
        return [kernel if product.is_smaller_than_gradients else kernel.materialized(), *self._biases(calls)]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        folded = self.folded(calls)
        kernel = self._concatenate(calls).squared_norms(calls[0].by_xla) if folded is None else squared_norm(folded)
        return [kernel, *map(tf.square, self._biases(calls))]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        folded = self.folded(calls)
        if folded is None:
            moment = self.kernel(calls[0].layer, self._concatenate(calls).second_moment(), calls[0].by_xla)
        else:
            moment = tf.reduce_sum(tf.square(folded), 0)
        return [moment, *(tf.reduce_sum(tf.square(bias), 0) for bias in self._biases(calls))]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        originals, by_xla = [call.original or call for call in calls], calls[0].by_xla
        biases = sums_of_biases(self._biases, calls, weights)
        folded = self.folded(calls)
        if folded is not None:
            return [weighted_sum(weights, folded), *biases]
        product = self._concatenate(originals)
        if not product.is_ghost(by_xla):
            # The norms are computed from these gradients too. They take little more memory than the factors, and may
            # be stored until the weights are known.
            return [self.kernel(calls[0].layer, product.sum_of_gradients(weights, by_xla), by_xla), *biases]
        return [tf.add_n([self.kernel_sum(call, weights) for call in calls]), *biases]

    def _concatenate(self, calls: Sequence[Call]) -> Product:
        return concatenate_products([self.product(call) for call in calls])

    def _biases(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The per-example gradients of the bias, if there is one."""
        layer = calls[0].layer
        if layer.bias is None:
            return []
        shape = self.bias_shape_in_output(layer, calls[0].cotangent.shape.rank)
        return [tf.add_n([bias_gradients(call.cotangent, shape, layer.bias) for call in calls])]


class _KernelLayout(NamedTuple):
    """The layout of kernel gradients stored as the factors of a product."""

    rule: Linear
    layer: keras.layers.Layer
    by_xla: bool

    def __call__(self, left: Any, right: Any) -> tf.Tensor:
        product = Product(tf.convert_to_tensor(left), tf.convert_to_tensor(right))
        return self.rule.kernel(self.layer, product.gradients(), self.by_xla)


def concatenate_products(products: Sequence[Product]) -> Product:
    """The products of several calls, concatenated along the positions."""
    if len(products) == 1:
        return products[0]
    return Product(
        tf.concat([product.left for product in products], 2), tf.concat([product.right for product in products], 2)
    )


def bias_gradients(cotangent: tf.Tensor, shape: Sequence[int], bias: keras.Variable) -> tf.Tensor:
    """The per-example gradients of a bias that was added in the given shape, `(batch, *bias.shape)`."""
    axes = bias_axes(cotangent, shape)
    sums = tf.reduce_sum(cotangent, [axis for axis in range(1, cotangent.shape.rank) if axis not in axes])
    return tf.reshape(sums, [-1, *bias.shape])


def bias_axes(cotangent: tf.Tensor, shape: Sequence[int]) -> list[int]:
    """The output axes along which a bias added in the given shape varies.

    The gradient goes where `keras.ops.add` put the bias. Before Keras 3.16, one with one axis larger than 1 went to the
    last axis if the lengths match, otherwise to the second, whichever axis it was meant for.
    """
    rank = cotangent.shape.rank
    axes = [axis for axis, size in enumerate(shape, start=rank - len(shape)) if size > 1]
    size = shape[axes[0] - rank] if len(axes) == 1 and _biases_go_to_the_last_axis() else None
    if size is not None and size in (cotangent.shape[1], cotangent.shape[-1]):
        return [rank - 1 if size == cotangent.shape[-1] else 1]
    return axes


@functools.cache
def _biases_go_to_the_last_axis() -> bool:
    """Whether Keras adds a bias that is meant for the second axis to the last one, if that is as long."""
    # In a graph nothing runs, so that devices can still be configured.
    with tf.Graph().as_default():
        added: Any = keras.ops.add(tf.zeros([1, 2, 1, 2]), tf.zeros([1, 2, 1, 1])).op
        return added.type == "BiasAdd" and added.get_attr("data_format") == b"NHWC"


def merge_axes(tensor: tf.Tensor, first: int, last: int) -> tf.Tensor:
    """Merges the axes from `first` up to `last` into one, of size 1 if there are none."""
    before, merged, after = tensor.shape[:first], tensor.shape[first:last].num_elements(), tensor.shape[last:]
    sizes: list[Any] = [*before, merged, *after]
    if sizes.count(None) > 1 or 0 in sizes:
        dynamic = tf.shape(tensor)
        axes = zip(sizes, [*range(first), None, *range(last, tensor.shape.rank)], strict=True)
        sizes = [dynamic[axis] if size is None and axis is not None else size for size, axis in axes]
    return tf.reshape(tensor, [-1 if size is None else size for size in sizes])


def _matmul(left: tf.Tensor, right: tf.Tensor, **transposed: Any) -> tf.Tensor:
    # TensorFlow's batched matmul is faster with one batch axis than with two, and most layers have one group.
    if left.shape[1] != 1:
        return tf.matmul(left, right, **transposed)
    return tf.expand_dims(tf.matmul(_without_groups(left), _without_groups(right), **transposed), 1)


def _without_groups(side: tf.Tensor) -> tf.Tensor:
    # TensorFlow simplifies chained reshapes, so that common subexpressions are computed once.
    if side.shape.is_fully_defined():
        return tf.reshape(side, [side.shape[0], *side.shape[2:]])
    return tf.squeeze(side, 1)
