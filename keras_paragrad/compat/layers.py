"""The state of a layer's call, and the dense tensors of its nested inputs and outputs."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from tensorflow.python.eager.record import could_possibly_record
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that a layer is made of, one level down."""
    return layer._flatten_layers(include_self=False, recursive=False)


def outermost_layer() -> keras.layers.Layer | None:
    """The layer whose call this code runs in, the outermost of those that called each other."""
    context = get_global_attribute("current_call_ctx")
    return context.entry_layer if context else None


def compiled_by_xla() -> bool:
    """Whether this code is traced for XLA, or the model whose call it runs in compiles its step with it."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return True
    model: Any = outermost_layer()
    return isinstance(model, keras.Model) and model.compiled and bool(model.jit_compile)


def called_for_training() -> bool:
    """Whether the call this code runs in was asked to train."""
    context = get_global_attribute("current_call_ctx")
    return bool(context and context.get_value("training"))


def may_be_differentiated() -> bool:
    """Whether a gradient may be asked of what is computed here: not if Keras only infers shapes, or predicts."""
    if in_symbolic_scope() or tf.distribute.in_cross_replica_context():
        return False
    return could_possibly_record() or (called_for_training() and not tf.executing_eagerly())


def assign_now(variable: keras.Variable, value: Any) -> None:
    """Assigns to a variable although a `StatelessScope` is open."""
    variable._direct_assign(value)


def mask_of(tensor: Any) -> Any:
    """The mask that hangs on a tensor, or `None`."""
    return get_keras_mask(tensor)


def with_mask(tensor: Any, mask: Any) -> Any:
    """The tensor, with a mask hung on it if there is one."""
    if mask is not None:
        set_keras_mask(tensor, mask)
    return tensor


def copy_mask(origin: Any, tensor: Any) -> None:
    """Hangs on a tensor the mask of another, or none if that has none."""
    if mask_of(origin) is not mask_of(tensor):
        set_keras_mask(tensor, mask_of(origin))


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Reads weights as they are stored, whatever dtype the layer computes in."""
    with AutocastScope(None):
        yield


class CallState:
    """What layers know of the call around them when this is made: who called, whether to train, in which dtype."""

    def __init__(self):
        # Later calls change the context itself.
        self.context = copy.copy(get_global_attribute("current_call_ctx"))
        scope = get_autocast_scope()
        self.dtype = scope and scope.dtype

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which they find out the same, for a part of the call that runs again later."""
        before = get_global_attribute("current_call_ctx")
        set_global_attribute("current_call_ctx", copy.copy(self.context))
        try:
            with AutocastScope(self.dtype):
                yield
        finally:
            set_global_attribute("current_call_ctx", before)


@contextlib.contextmanager
def attributes(layer: keras.layers.Layer, **values: Any) -> Iterator[None]:
    """Context that sets attributes of a layer, bypassing Keras's tracking."""
    own = vars(layer)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del own[name]
        own.update(before)


def has_gradient(tensor: tf.Tensor) -> bool:
    """Whether a tensor's dtype allows a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def dense_parts(leaf: Any) -> list[tf.Tensor]:
    """The dense tensors that one is made of; none where it is no tensor."""
    return tf.nest.flatten(leaf, expand_composites=True) if tf.is_tensor(leaf) else []


def pack_dense_parts(
    leaves: Sequence[Any], parts: Sequence[Sequence[tf.Tensor]], masks: Sequence[Any] | None = None
) -> list[Any]:
    """Leaves made of other tensors, each with the mask that hung on it.

    Args:
        leaves: The leaves.
        parts: What `dense_parts` gives for each, or tensors in place of those.
        masks: The masks that hung on them, if they may hang there no more: attention takes them off its inputs.
    """

    def remade(leaf, tensors, mask):
        if not tensors:
            return leaf
        made = tf.nest.pack_sequence_as(leaf, list(tensors), expand_composites=True)
        return made if made is leaf else with_mask(made, mask)

    hung = map(mask_of, leaves) if masks is None else masks
    return [remade(*each) for each in zip(leaves, parts, hung, strict=True)]
