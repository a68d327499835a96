"""Replaces operations that DTensor lacks or computes wrong by equivalent ones.

Each function has the signature of the operation that it replaces, and returns `None` to keep the original. To *pin* a
tensor is to divide it among the devices by rows only.
"""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.operations import array_ops, gen_array_ops
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.types import Array
from keras_paragrad.engine.mesh.pinning import pin_on_mesh
from keras_paragrad.storage.dtensor import computing_on_mesh, relayout


def reverse(tensor: tf.Tensor, axis: Array, name: str | None = None) -> tf.Tensor | None:
    """`tf.reverse`; `None` unless the axes are static."""
    tensor, axes = tf.convert_to_tensor(tensor), tf.get_static_value(axis)
    if axes is None:
        return None
    for dimension in np.ravel(axes):
        tensor = _reverse(tensor, int(dimension))
    return tensor


def strided_slice(
    input: tf.Tensor,
    begin: Array,
    end: Array,
    strides: Array,
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
    name: str | None = None,
) -> tf.Tensor | None:
    """`tf.strided_slice` with the indexed axes kept, then squeezed.

    Otherwise DTensor confuses which remaining axis is divided. `None` if no axis is indexed, or if indices aren't
    static.
    """
    if not shrink_axis_mask or ellipsis_mask or new_axis_mask:
        return None
    tensor, first, last = tf.convert_to_tensor(input), tf.get_static_value(begin), tf.get_static_value(end)
    if first is None or last is None or (tensor.shape.rank or 0) < 2:
        return None
    axes = [axis for axis in range(len(first)) if shrink_axis_mask >> axis & 1]
    # The index -1 has no end.
    end_mask |= sum(1 << axis for axis in axes if first[axis] == -1)
    last = [index + 1 if axis in axes else last[axis] for axis, index in enumerate(first)]
    return tf.squeeze(tf.strided_slice(tensor, first, last, strides, begin_mask, end_mask), axes)


def _reverse(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Reverses an axis of static size by a gather, and its gradient too: that of `tf.gather` would scatter."""
    axis %= len(tensor.shape)
    size: Any = tensor.shape[axis]
    order = np.arange(size, dtype="int32")[::-1]

    @tf.custom_gradient
    def reversed_(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return _take(tensor, axis, order), lambda cotangent: _take(cotangent, axis, order)

    result: Any = reversed_(tensor)
    return result


def _take(tensor: tf.Tensor, axis: int, order: np.ndarray) -> tf.Tensor:
    """Gathers a tensor in another order along an axis; each device gets all rows first if it is the axis of rows."""
    exchange = axis == 0 and computing_on_mesh()
    local = relayout(tensor, (None,) * len(tensor.shape)) if exchange else pin_on_mesh(tensor)
    return pin_on_mesh(tf.gather(local, order, axis=axis))


EQUIVALENTS: tuple[tuple[ModuleType, str, Callable[..., tf.Tensor | None]], ...] = (
    (tf, "reverse", reverse),
    (array_ops, "reverse", reverse),
    (array_ops, "reverse_v2", reverse),
    (gen_array_ops, "strided_slice", strided_slice),
)


def _compute(
    equivalent: Callable[..., tf.Tensor | None], _: bool, plain: Callable[..., tf.Tensor], *args: Any, **kwargs: Any
) -> tf.Tensor:
    """Computes an equivalent on a mesh, and the plain operation elsewhere, or where the equivalent returns `None`."""
    result = equivalent(*args, **kwargs) if computing_on_mesh() else None
    return plain(*args, **kwargs) if result is None else result


_PATCH = ProcessPatch[bool](
    lambda: [Replacement(module, name, functools.partial(_compute, by)) for module, name, by in EQUIVALENTS]
)


def substituted_operations() -> contextlib.AbstractContextManager[object]:
    """Context in which this thread, tracing a step for a mesh, replaces these operations."""
    return _PATCH.open(True)
