"""The context of a layer's call, tensors read in place of variables, and the dense tensors of nested values."""

import contextlib
import copy
import inspect
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.private import (
    AutocastScope,
    GraphOrParentsInXlaContext,
    could_possibly_record,
    get_autocast_scope,
    get_keras_mask,
    get_stateless_scope,
    global_state,
    in_symbolic_scope,
    set_keras_mask,
)
from keras_paragrad.compat.types import Structure

T = TypeVar("T")
# None before Keras 3.12.
REVERSIBLE_EMBEDDINGS: tuple[Any, ...] = tuple(
    getattr(keras.layers, name) for name in ("ReversibleEmbedding",) if hasattr(keras.layers, name)
)


def state_of_thread() -> dict[str, Any]:
    """Keras's global state of this thread, by name: the open scopes, the context of a call, and the seed.

    `keras.utils.clear_session` begins a new dictionary.
    """
    return vars(global_state.GLOBAL_STATE_TRACKER)


def get_global_attribute(name: str) -> Any:
    """A value of the state of this thread, or `None`."""
    return state_of_thread().get(name)


def set_global_attribute(name: str, value: object) -> None:
    """Sets a value of the state of this thread."""
    state_of_thread()[name] = value


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A layer's direct sublayers."""
    return layer._flatten_layers(include_self=False, recursive=False)


def call_method(layer: keras.layers.Layer) -> str:
    """The name of the method that Keras calls for a layer's outputs."""
    return "call" if getattr(layer, "quantization_mode", None) is None else "quantized_call"


def call_model(model: keras.layers.Layer, *inputs: Any, training: bool) -> Any:
    """Calls a model or layer as `fit` does: with `training` only if its `call` takes that."""
    takes_training = "training" in inspect.signature(type(model).call).parameters
    return model(*inputs, training=training) if takes_training else model(*inputs)


def outermost_layer() -> keras.layers.Layer | None:
    """The outermost layer whose call this code runs in."""
    context = get_global_attribute("current_call_ctx")
    return context.entry_layer if context else None


def compiled_by_xla() -> bool:
    """Whether this code is traced for XLA, or within the call of a model with `jit_compile=True`."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return True
    model: Any = outermost_layer()
    return isinstance(model, keras.Model) and model.compiled and bool(model.jit_compile)


def called_for_training() -> bool:
    """Whether this code runs in a call with `training=True`."""
    context = get_global_attribute("current_call_ctx")
    return bool(context and context.get_value("training"))


def may_be_differentiated() -> bool:
    """Whether gradients of this code may be needed: not if Keras only infers shapes, or predicts."""
    if in_symbolic_scope() or tf.distribute.in_cross_replica_context():
        return False
    return could_possibly_record() or (called_for_training() and not tf.executing_eagerly())


def assign_now(variable: keras.Variable, value: tf.Tensor) -> None:
    """Assigns to a variable even within a `StatelessScope`."""
    variable._direct_assign(value)


def mask_of(tensor: object) -> tf.Tensor | None:
    """A tensor's Keras mask, or `None`."""
    return get_keras_mask(tensor)


def with_mask(tensor: T, mask: tf.Tensor | None) -> T:
    """Sets a tensor's mask, unless it is `None`; returns the tensor."""
    if mask is not None:
        set_keras_mask(tensor, mask)
    return tensor


def copy_mask(origin: object, tensor: object) -> None:
    """Copies the mask of `origin` to a tensor."""
    if mask_of(origin) is not mask_of(tensor):
        set_keras_mask(tensor, mask_of(origin))


def full_precision() -> contextlib.AbstractContextManager[object]:
    """Context in which weights are read in their own dtype, without autocasting."""
    return AutocastScope(None)


def dtype_within(variable: keras.Variable, dtype: str | None) -> str:
    """The dtype that a variable is read in by a layer that computes in `dtype`; its own, if `None`."""
    if dtype is None:
        # In a scope without a dtype, Keras's property returns the default scope's dtype.
        return variable._dtype
    with AutocastScope(dtype):
        return variable.dtype


class CallState:
    """Keras's call context and autocast dtype at creation, to re-enter later."""

    def __init__(self):
        # Later calls mutate the context.
        self.context = copy.copy(get_global_attribute("current_call_ctx"))
        scope = get_autocast_scope()
        self.dtype = scope and scope.dtype

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Context that restores this state, to run a part of the layer's call again."""
        before = get_global_attribute("current_call_ctx")
        set_global_attribute("current_call_ctx", copy.copy(self.context))
        try:
            with AutocastScope(self.dtype):
                yield
        finally:
            set_global_attribute("current_call_ctx", before)


@contextlib.contextmanager
def override_attributes(layer: keras.layers.Layer, **values: Any) -> Generator[None]:
    """Context that sets attributes of a layer, bypassing Keras's tracking."""
    attributes = vars(layer)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del attributes[name]
        attributes.update(before)


@contextlib.contextmanager
def without_remat_scope(layer: keras.layers.Layer) -> Generator[None]:
    """Context in which a layer and its sublayers keep what a `keras.RematScope` would have them recompute."""
    with contextlib.ExitStack() as stack:
        for inner in layer._flatten_layers():
            stack.enter_context(override_attributes(inner, _remat_mode=None))
        yield


def has_gradient(tensor: tf.Tensor) -> bool:
    """Whether a tensor's dtype allows a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def dense_parts(leaf: object) -> list[tf.Tensor]:
    """The dense component tensors of a leaf; none if it is not a tensor."""
    return tf.nest.flatten(leaf, expand_composites=True) if tf.is_tensor(leaf) else []


def pack_dense_parts(
    leaves: Sequence[Structure], parts: Sequence[Sequence[tf.Tensor]], masks: Sequence[tf.Tensor | None] | None = None
) -> list[Any]:
    """Rebuilds leaves from tensors in place of their `dense_parts`, with the leaves' masks, or with those given."""

    def pack(leaf: Structure, tensors: Sequence[tf.Tensor], mask: tf.Tensor | None):
        if not tensors:
            return leaf
        packed = tf.nest.pack_sequence_as(leaf, list(tensors), expand_composites=True)
        return packed if packed is leaf else with_mask(packed, mask)

    masks = [mask_of(leaf) for leaf in leaves] if masks is None else masks
    return [pack(*arguments) for arguments in zip(leaves, parts, masks, strict=True)]


class WeightScope(keras.StatelessScope):
    """A stateless scope in which weight regularizers read the weights that it has no values of."""

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        # Keras passes regularizers what this returns, and elsewhere reads such weights itself.
        return variable._value if value is None and variable.regularizer is not None else value


class ReadScope(keras.StatelessScope):
    """Context in which layers read variables from tensors, and which collects their assignments.

    Args:
        name: The name of the layers in errors.
        values: The variables, each with the tensor to read.
        reason: Why a layer can't assign to a weight here, and what to do instead.
        once: Whether this is the layers' first run, so that some of them may be recomputed in the backward pass; false
            in the second run of layers that are recomputed as a whole.

    Attributes:
        missing: Variables that were used and are not among `values`, by id.
    """

    def __init__(
        self, name: str, values: Sequence[tuple[keras.Variable, tf.Tensor]], reason: str, *, once: bool = False
    ):
        super().__init__(state_mapping=values, collect_losses=True, initialize_variables=False)
        self.name, self.values, self.reason, self.once = name, list(values), reason, once
        self.missing: dict[int, keras.Variable] = {}
        self._known = {id(variable) for variable, _ in values}
        self._assigned: dict[int, keras.Variable] = {}

    @property
    def updates(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The assigned variables with their last values, in the order of the first assignment."""
        return [(variable, self.get_current_value(variable)) for variable in self._assigned.values()]

    def get_current_value(self, variable: keras.Variable) -> Any:
        self._record_use(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        self._record_use(variable)
        if variable.trainable:
            raise ValueError(
                f"{self.name!r} assigns to its weight {variable.path!r} when it is called, and {self.reason}"
            )
        self._assigned.setdefault(id(variable), variable)
        # No gradient flows through an assignment, as with variables.
        super().add_update((variable, tf.stop_gradient(value)))

    def _record_use(self, variable: keras.Variable) -> None:
        if id(variable) not in self._known:
            self.missing[id(variable)] = variable


def current_read_scope() -> ReadScope | None:
    """The innermost open scope, if it is a `ReadScope`."""
    scope = get_stateless_scope()
    return scope if isinstance(scope, ReadScope) else None


def in_other_scope() -> bool:
    """Whether a stateless scope is open in which layers can't be recomputed: any but a `ReadScope` of a first run."""
    scope = current_read_scope()
    return get_stateless_scope() is not None and not (scope and scope.once)
