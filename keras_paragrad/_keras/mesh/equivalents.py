"""Operations that DTensor has no rule for, computed by others that it has rules for."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import array_ops, gen_manip_ops, gen_nn_ops

from keras_paragrad._keras.mesh.dtensor import computing_on_mesh, relayout
from keras_paragrad._keras.mesh.image_gradients import (
    average_pool_gradient,
    depthwise_filter_gradient,
    depthwise_input_gradient,
)
from keras_paragrad._keras.mesh.pinning import pinned_in_steps


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
