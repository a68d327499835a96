"""What Keras does while a step on a mesh is traced: outputs are laid out, and loops unrolled."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import distribution_lib
from tensorflow.python.ops import array_ops, gen_array_ops, gen_manip_ops, gen_nn_ops

from keras_paragrad.compat.layers import attributes
from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.mesh.errors import check_operations
from keras_paragrad.engine.mesh.image_gradients import (
    average_pool_gradient,
    depthwise_filter_gradient,
    depthwise_input_gradient,
)
from keras_paragrad.engine.mesh.pinning import pinned_between_layers, pinned_in_steps
from keras_paragrad.storage.dtensor import computing_on_mesh, relayout


def flipped(tensor: Any, axis: Any, name: str | None = None) -> Any:
    """`tf.reverse`, or `None` if the axes aren't known yet."""
    tensor, axes = tf.convert_to_tensor(tensor), tf.get_static_value(axis)
    if axes is None:
        return None
    for each in np.ravel(axes):
        tensor = _permuted(tensor, int(each) % len(tensor.shape), lambda length: np.arange(length)[::-1])
    return tensor


def rolled(input: Any, shift: Any, axis: Any, name: str | None = None) -> Any:
    """`tf.roll`, or `None` if it isn't known yet by how much."""
    tensor, shifts, axes = tf.convert_to_tensor(input), tf.get_static_value(shift), tf.get_static_value(axis)
    if shifts is None or axes is None:
        return None
    for each, by in zip(np.ravel(axes), np.ravel(shifts), strict=True):
        tensor = _permuted(tensor, int(each) % len(tensor.shape), functools.partial(_rolled_order, by=int(by)))
    return tensor


def blocks_to_batch(input: Any, block_shape: Any, paddings: Any, name: str | None = None) -> Any:
    """`tf.space_to_batch_nd`, but the blocks of an example stay beside each other, and so with the device of its row.

    `None` if the sizes aren't known yet.
    """
    block, padding = _known_pair(block_shape, paddings)
    if block is None:
        return None
    tensor = pinned_in_steps(tf.convert_to_tensor(input))
    tensor = tf.pad(tensor, [[0, 0], *padding, *[[0, 0]] * (len(tensor.shape) - len(block) - 1)])
    rows, *sizes = _sizes(tensor)
    others = sizes[len(block) :]
    inner = [size // each for size, each in zip(sizes, block, strict=False)]
    tensor = tf.reshape(tensor, [rows, *(part for pair in zip(inner, block, strict=True) for part in pair), *others])
    order = [0, *range(2, 2 * len(block) + 1, 2), *range(1, 2 * len(block), 2)]
    tensor = tf.transpose(tensor, [*order, *range(2 * len(block) + 1, len(tensor.shape))])
    return tf.reshape(tensor, [rows * math.prod(block), *inner, *others])


def batch_to_blocks(input: Any, block_shape: Any, crops: Any, name: str | None = None) -> Any:
    """`tf.batch_to_space`, of what `blocks_to_batch` has made."""
    block, cropped = _known_pair(block_shape, crops)
    if block is None:
        return None
    tensor = tf.convert_to_tensor(input)
    count, (rows, *sizes) = len(block), _sizes(tensor)
    rows //= math.prod(block)
    tensor = pinned_in_steps(tf.reshape(tensor, [rows, *block, *sizes]))
    order = [place for axis in range(1, count + 1) for place in (count + axis, axis)]
    tensor = tf.transpose(tensor, [0, *order, *range(2 * count + 1, len(tensor.shape))])
    whole = [size * each for size, each in zip(sizes, block, strict=False)]
    tensor = pinned_in_steps(tf.reshape(tensor, [rows, *whole, *sizes[count:]]))
    # Not `tf.slice`, whose gradient is another operation under XLA.
    return tensor[(slice(None), *(slice(a, size - b) for size, (a, b) in zip(whole, cropped, strict=True)))]


def _sizes(tensor: Any) -> list[int]:
    return tensor.shape.as_list()


def _known_pair(block_shape: Any, pairs: Any) -> tuple[list[int] | None, list[list[int]]]:
    block, known = tf.get_static_value(block_shape), tf.get_static_value(pairs)
    return (None, []) if block is None or known is None else (block.tolist(), known.tolist())


def shrunk_last(
    input: Any,
    begin: Any,
    end: Any,
    strides: Any,
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
    name: str | None = None,
) -> Any:
    """`tf.strided_slice` of tensors, with axes that a single place is taken of removed after it.

    DTensor mistakes which of the others is divided. `None` if no axis is removed, or it isn't known yet which places
    are taken.
    """
    if not shrink_axis_mask or ellipsis_mask or new_axis_mask:
        return None
    tensor, first, last = tf.convert_to_tensor(input), tf.get_static_value(begin), tf.get_static_value(end)
    if first is None or last is None or (tensor.shape.rank or 0) < 2:
        return None
    axes = [axis for axis in range(len(first)) if shrink_axis_mask >> axis & 1]
    # The last place has no next one.
    end_mask |= sum(1 << axis for axis in axes if first[axis] == -1)
    last = [place + 1 if axis in axes else last[axis] for axis, place in enumerate(first)]
    found = tf.strided_slice(tensor, first, last, strides, begin_mask, end_mask)
    return tf.squeeze(found, axes)


def _rolled_order(length: int, by: int) -> np.ndarray:
    return np.roll(np.arange(length), by)


def _permuted(tensor: Any, axis: int, order_of: Callable[[int], np.ndarray]) -> Any:
    order = order_of(tensor.shape[axis])

    @tf.custom_gradient
    def permuted(tensor: Any) -> Any:
        return _taken(tensor, axis, order), lambda cotangent: _taken(cotangent, axis, np.argsort(order))

    return permuted(tensor)


def _taken(tensor: Any, axis: int, order: np.ndarray) -> Any:
    """A tensor in another order along an axis, which may be that of rows, whose devices have to exchange them."""
    whole = axis == 0 and computing_on_mesh()
    held = relayout(tensor, (None,) * len(tensor.shape)) if whole else pinned_in_steps(tensor)
    return pinned_in_steps(tf.gather(held, order.astype("int32"), axis=axis))


EQUIVALENTS: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
    (tf, "reverse", flipped),
    (array_ops, "reverse", flipped),
    (array_ops, "reverse_v2", flipped),
    (gen_manip_ops, "roll", rolled),
    (gen_array_ops, "strided_slice", shrunk_last),
    # Dilated convolutions are made of these two.
    (array_ops, "space_to_batch_nd", blocks_to_batch),
    (array_ops, "batch_to_space_nd", batch_to_blocks),
    (gen_nn_ops, "avg_pool_grad", average_pool_gradient),
    (gen_nn_ops, "avg_pool3d_grad", average_pool_gradient),
    (gen_nn_ops, "depthwise_conv2d_native_backprop_input", depthwise_input_gradient),
    (gen_nn_ops, "depthwise_conv2d_native_backprop_filter", depthwise_filter_gradient),
)


@contextlib.contextmanager
def with_equivalents() -> Iterator[None]:
    """Context in which steps that are traced for a mesh compute these operations by others."""
    with contextlib.ExitStack() as stack:
        for module, name, equivalent in EQUIVALENTS:
            plain = vars(module)[name]
            vars(module)[name] = _instead(plain, equivalent)
            stack.callback(vars(module).__setitem__, name, plain)
        yield


def _instead(plain: Callable[..., Any], equivalent: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def computed(*arguments: Any, **keywords: Any) -> Any:
        # Other threads may trace for one device.
        found = equivalent(*arguments, **keywords) if computing_on_mesh() else None
        return plain(*arguments, **keywords) if found is None else found

    return computed


class Outputs:
    """Keras's distribution of a model, as it is asked for how outputs of layers are divided.

    Args:
        distribution: A `keras.distribution.DataParallel` or `ModelParallel`.
    """

    def __init__(self, distribution: Any):
        self._distribution = distribution
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distribution, name)

    def get_tensor_layout(self, path: str) -> Any:
        """The layout of a tensor, or `None`; what is asked is remembered."""
        self.asked.add(path)
        return self._distribution.get_tensor_layout(path)


def layout_keys(distribution: Any) -> list[str]:
    """The keys of a distribution's layout map, if it has one."""
    return list(getattr(distribution, "_layout_map", ()))


@contextlib.contextmanager
def traced_for_mesh(model: Any, outputs: Outputs) -> Iterator[None]:
    """Context in which a step is traced that is to run on a mesh.

    Raises:
        ValueError: It has operations that DTensor can't run. The message names the layer.
    """
    with (
        _laid_out(outputs),
        _unrolled(model),
        _with_constants(model),
        pinned_between_layers(model),
        with_equivalents(),
    ):
        yield
    if not tf.executing_eagerly():
        check_operations(model, tf.compat.v1.get_default_graph().get_operations())


@contextlib.contextmanager
def _laid_out(outputs: Outputs) -> Iterator[None]:
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(outputs)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def let_keras_lay_out() -> None:
    """Gives Keras what it lacks on TensorFlow, and fails without in the scope of a distribution: layouts of outputs."""
    vars(distribution_lib).setdefault("distribute_tensor", _distribute_tensor)


def _distribute_tensor(tensors: Any, layout: Any) -> Any:
    if not computing_on_mesh():
        return tensors

    def distribute(tensor: Any) -> Any:
        if len(tensor.shape) != len(layout.axes):
            raise ValueError(
                f"The layout {layout.axes} has {len(layout.axes)} dimensions, and the output that it is for has the "
                f"shape {tuple(tensor.shape)}. Name an axis or None for each of them."
            )
        return relayout(tensor, layout.axes)

    return keras.tree.map_structure(distribute, tensors)


@contextlib.contextmanager
def _with_constants(model: Any) -> Iterator[None]:
    """Context in which what layers keep as tensors, such as means and variances, is part of the graph.

    A step on a mesh can't use tensors from outside of it.
    """
    with contextlib.ExitStack() as stack:
        for layer in all_layers(model):
            kept = {name: each for name, each in vars(layer).items() if _is_array(each)}
            if kept:
                stack.enter_context(attributes(layer, **{name: tf.constant(kept[name].numpy()) for name in kept}))
        yield


def _is_array(found: Any) -> bool:
    return isinstance(found, tf.Tensor) and hasattr(found, "numpy") and bool(found.shape.rank)


@contextlib.contextmanager
def _unrolled(model: Any) -> Iterator[None]:
    """Context in which recurrent layers have no loop, which DTensor can't run."""
    layers: list[Any] = [each for each in all_layers(model) if isinstance(each, keras.layers.RNN) and not each.unroll]
    for layer in layers:
        layer.unroll = True
    try:
        yield
    finally:
        for layer in layers:
            layer.unroll = False
