"""Traces steps for a mesh: applies layouts to outputs, unrolls loops, and explains DTensor's errors.

Operations that DTensor lacks or computes wrong are replaced by equivalents: functions of the same signature, which
return `None` to keep the original. To *pin* a tensor is to divide it among the devices by rows only.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import children, copy_mask, override_attributes
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.operations import array_ops, gen_array_ops
from keras_paragrad.compat.private import distribution_lib, in_symbolic_scope
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.types import Array, Structure
from keras_paragrad.storage.dtensor import Layout, computing_on_mesh, relayout


def layout_keys(distribution: keras.distribution.ModelParallel) -> list[str]:
    """The keys of a distribution's layout map, if it has one."""
    return list(getattr(distribution, "_layout_map", ()))


@contextlib.contextmanager
def tracing_for_mesh(model: keras.Model, distribution: keras.distribution.ModelParallel) -> Generator[None]:
    """Context in which a step for a mesh is traced. Refuses operations that DTensor can't run, and names the layer."""
    with (
        _distribution_set(distribution),
        _with_own_attributes(model),
        pinning_between_layers(model),
        _PATCH.open(True),
    ):
        yield
    if not tf.executing_eagerly():
        for operation in tf.compat.v1.get_default_graph().get_operations():
            if _UNSUPPORTED.fullmatch(operation.type):
                raise ValueError(_refusal(model, operation.type, _layer_of(model, operation.name)) + ".")


@contextlib.contextmanager
def _distribution_set(distribution: keras.distribution.ModelParallel) -> Generator[None]:
    """Context in which `keras.distribution.distribution()` is set."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def install_distribute_tensor() -> None:
    """Adds functions that Keras's TensorFlow backend lacks: output layouts, and before Keras 3.15 process counts."""
    lacking = {"distribute_tensor": _distribute_tensor, "num_processes": lambda: 1, "process_id": lambda: 0}
    for name, function in lacking.items():
        vars(distribution_lib).setdefault(name, function)


def _distribute_tensor(tensors: Structure, layout: Layout) -> Structure:
    """Applies a layout to a layer's outputs, as `keras.distribution` expects from a backend."""
    if not computing_on_mesh():
        return tensors

    def distribute(tensor: tf.Tensor) -> tf.Tensor:
        if len(tensor.shape) != len(layout.axes):
            raise ValueError(
                f"The layout {layout.axes} has {len(layout.axes)} dimensions, and the output that it is for has the "
                f"shape {tuple(tensor.shape)}. Name an axis or None for each of them."
            )
        return relayout(tensor, layout.axes)

    return keras.tree.map_structure(distribute, tensors)


@contextlib.contextmanager
def _with_own_attributes(model: keras.Model) -> Generator[None]:
    """Context in which recurrent layers unroll their loops, and eager tensors in layers are constants.

    DTensor can't run loops. A step on a mesh can't capture tensors, such as the mean of a Normalization layer.
    """
    with contextlib.ExitStack() as stack:
        for layer in all_layers(model):
            values: dict[str, Any] = {
                name: tf.constant(value.numpy()) for name, value in vars(layer).items() if _is_array(value)
            }
            if isinstance(layer, keras.layers.RNN):
                values["unroll"] = True
            stack.enter_context(override_attributes(layer, **values))
        yield


def _is_array(value: object) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "numpy") and bool(value.shape.rank)


# DTensor has no rule for these operations. Some of them end the process.
_UNSUPPORTED = re.compile(
    r"While|StatelessWhile|TensorList\w*|TensorArray\w*|AvgPool3?D?Grad|DepthwiseConv2dNativeBackprop\w+|Reverse(V2)?|"
    r"ReverseSequence|Roll|EagerPyFunc|PyFunc\w*"
)
_OPERATION = re.compile(r"\btf\.([A-Z]\w+)")


@contextlib.contextmanager
def explaining_errors(model: keras.Model) -> Generator[None]:
    """Context that replaces DTensor's errors by ones that name the layer and the fix.

    It covers operations and layouts for which DTensor has no rule, and graphs that can't run.
    """
    try:
        yield
    except tf.errors.OpError as error:
        message = error.message.lower()
        if "nodes in a cycle" in message:
            raise ValueError(
                f"TensorFlow makes a graph of the step of {model.name!r} that it can't run on a mesh: {error.message}. "
                "It does so where a segment that is recomputed ends with a strided convolution. Recompute single "
                "layers, as in recompute(model, layers=['conv2d_1', 'dense']), or train with "
                'DistributedFit("mirrored", shard="parameters").'
            ) from error
        if "dtensor" not in message or "collective ops is aborted" in message:
            # This is another error, such as a lost worker.
            raise
        operations = _OPERATION.findall(error.message)
        layer = _layer_of(model, error.message)
        refusal = _refusal(model, operations[-1] if operations else "an operation", layer)
        raise ValueError(
            f"{refusal}. If the layer has divided variables, it may be enough to give them no layout, so that each "
            "device has them whole."
        ) from error


def _refusal(model: keras.Model, operation: str, layer: str | None) -> str:
    """The error for an operation that DTensor can't run, without a period. `layer` is a name, if known."""
    where = f"The layer {layer!r}" if layer else f"The model {model.name!r}"
    return (
        f"{where} needs the operation {operation}, for which TensorFlow has no rule on a mesh, or none for how its "
        'inputs are divided. Train with DistributedFit("mirrored", shard="parameters"), which divides weights and runs '
        "any operation"
    )


def _layer_of(model: keras.Model, text: str) -> str | None:
    """The innermost layer whose name is in an operation's name or in an error, or `None`."""
    words = set(re.split(r"[^\w.-]+", text))
    # TensorFlow appends numbers to scopes of the same name.
    words |= {re.sub(r"_\d+$", "", word) for word in words}
    return next((layer.name for layer in reversed(all_layers(model)) if layer.name in words), None)


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
    """`tf.strided_slice` that keeps indexed axes, and then squeezes them; `None` without such axes or static indices.

    If the operation drops axes itself, DTensor mixes up which of the others is divided.
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
    """Reverses an axis of static size by a gather, and so its gradient, where that of `tf.gather` would scatter."""
    axis %= len(tensor.shape)
    size: Any = tensor.shape[axis]
    order = np.arange(size, dtype="int32")[::-1]

    @tf.custom_gradient
    def reversed_(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return _reorder(tensor, axis, order), lambda cotangent: _reorder(cotangent, axis, order)

    result: Any = reversed_(tensor)
    return result


def _reorder(tensor: tf.Tensor, axis: int, order: np.ndarray) -> tf.Tensor:
    """Puts a tensor in another order along an axis. To reorder rows, each device first gets all of them."""
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
    """Computes an equivalent on a mesh, or the plain operation, also if the equivalent returns `None`."""
    result = equivalent(*args, **kwargs) if computing_on_mesh() else None
    return plain(*args, **kwargs) if result is None else result


_PATCH = ProcessPatch[bool](
    lambda: [Replacement(module, name, functools.partial(_compute, by)) for module, name, by in EQUIVALENTS]
)


# DTensor computes these layers correctly for any layout, so a Dense layer may get outputs divided by units.
_UNPINNED = (
    keras.layers.Dense,
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
    keras.layers.Identity,
)
# Layers inside of these layers are not pinned: attention keeps heads divided, and cells compute with whole weights.
_PINNED_AS_A_WHOLE = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention, keras.layers.RNN)


class TracedRows(threading.local):
    """The number of rows for which this thread traces a step, and the mesh axis that divides them."""

    count: int = 0
    axis: str | None = None


ROWS = TracedRows()


@contextlib.contextmanager
def pinning_between_layers(model: keras.Model) -> Generator[None]:
    """Context in which the inputs and outputs of layers are divided only by rows.

    With layouts that it chooses, DTensor computes some operations wrong, such as a concatenation along a divided
    dimension or a reshape that splits one.
    """
    layers = all_layers(model)
    inside = {
        id(descendant)
        for layer in layers
        if isinstance(layer, _PINNED_AS_A_WHOLE)
        for descendant in _descendants(layer)
    }
    # A wrapper may combine its layer's outputs: TimeDistributed stacks them. So the layer is pinned.
    wrapped = {id(layer.layer) for layer in layers if isinstance(layer, keras.layers.Wrapper)}
    unpinned = {id(layer) for layer in layers if type(layer) in _UNPINNED} - wrapped
    pinned = [layer for layer in layers if id(layer) not in inside | unpinned and not isinstance(layer, keras.Model)]
    with contextlib.ExitStack() as stack:
        for layer in [model, *pinned]:
            stack.enter_context(override_attributes(layer, call=_pin_call(layer.call)))
        yield


def _descendants(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for child in children(layer):
        yield child
        yield from _descendants(child)


def _pin_call(call: Callable[..., Structure]) -> Callable[..., Structure]:
    """Wraps a layer's `call` so that its inputs and outputs are pinned."""

    @functools.wraps(call)
    def pinned(*arguments: Any, **keywords: Any) -> Structure:
        if in_symbolic_scope() or not computing_on_mesh():
            return call(*arguments, **keywords)
        inputs = arguments, keywords
        arguments, keywords = keras.tree.map_structure(pin, inputs)
        outputs = call(*arguments, **keywords)
        pinned_inputs = keras.tree.flatten((arguments, keywords))
        for original, copy in zip(keras.tree.flatten(inputs), pinned_inputs, strict=True):
            if isinstance(original, tf.Tensor):
                # Attention clears its inputs' masks in place: clear the copies' masks instead.
                copy_mask(copy, original)
        return keras.tree.map_structure(pin, outputs)

    return pinned


def pin(tensor: object) -> Any:
    """Divides a tensor by rows, if it has as many as the batch. Otherwise makes it whole on each device."""
    if not isinstance(tensor, tf.Tensor) or tensor.shape.rank in (None, 0) or tensor.dtype in (tf.resource, tf.variant):
        return tensor
    axes = (ROWS.axis if tensor.shape[0] == ROWS.count else None, *[None] * (len(tensor.shape) - 1))
    pinned = relayout(tensor, axes)
    copy_mask(tensor, pinned)
    return pinned


def pin_on_mesh(tensor: tf.Tensor) -> tf.Tensor:
    """Pins a tensor if this thread traces a step for a mesh."""
    return pin(tensor) if computing_on_mesh() else tensor
