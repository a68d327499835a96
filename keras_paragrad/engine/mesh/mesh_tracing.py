"""Traces steps for a mesh: applies layouts to outputs, unrolls loops, and explains DTensor's errors."""

import contextlib
import re
from collections.abc import Generator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import attributes
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.private import distribution_lib
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.mesh.equivalents import substituted_operations
from keras_paragrad.engine.mesh.pinning import pinning_between_layers
from keras_paragrad.storage.dtensor import Layout, computing_on_mesh, relayout


class OutputLayouts:
    """Wraps a Keras distribution, and records in `requested` the paths of the outputs whose layouts Keras asks for."""

    def __init__(self, distribution: keras.distribution.ModelParallel):
        self._distribution = distribution
        self.requested: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distribution, name)

    def get_tensor_layout(self, path: str) -> Layout | None:
        """The layout of an output, or `None`."""
        self.requested.add(path)
        return self._distribution.get_tensor_layout(path)


def layout_keys(distribution: keras.distribution.ModelParallel) -> list[str]:
    """The keys of a distribution's layout map, if it has one."""
    return list(getattr(distribution, "_layout_map", ()))


@contextlib.contextmanager
def tracing_for_mesh(model: keras.Model, outputs: OutputLayouts) -> Generator[None]:
    """Context in which a step for a mesh is traced.

    Raises:
        ValueError: The step has operations that DTensor can't run. The message names the layer.
    """
    with (
        _distribution_set(outputs),
        _with_own_attributes(model),
        pinning_between_layers(model),
        substituted_operations(),
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
    """Adds functions missing in Keras's TensorFlow backend: layouts of outputs; before Keras 3.15, process counts."""
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
    """Context in which recurrent layers unroll their loops, which DTensor can't run, and layers' arrays are constants.

    A step on a mesh can't capture tensors, such as means and variances.
    """
    with contextlib.ExitStack() as stack:
        for layer in all_layers(model):
            values: dict[str, Any] = {
                name: tf.constant(value.numpy()) for name, value in vars(layer).items() if _is_array(value)
            }
            if isinstance(layer, keras.layers.RNN):
                values["unroll"] = True
            stack.enter_context(attributes(layer, **values))
        yield


def _is_array(value: object) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "numpy") and bool(value.shape.rank)


# DTensor has no rule for these; some of them end the process.
_UNSUPPORTED = re.compile(
    r"While|StatelessWhile|TensorList\w*|TensorArray\w*|AvgPool3?D?Grad|DepthwiseConv2dNativeBackprop\w+|Reverse(V2)?|"
    r"ReverseSequence|Roll|EagerPyFunc|PyFunc\w*"
)
_OPERATION = re.compile(r"\btf\.([A-Z]\w+)")


@contextlib.contextmanager
def explaining_errors(model: keras.Model) -> Generator[None]:
    """Context that replaces DTensor's errors by ones that name the layer and the fix.

    Raises:
        ValueError: DTensor has no rule for an operation, or for the layout of its inputs, or makes a graph that can't
            run.
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
            # Another error, such as a lost worker.
            raise
        operations = _OPERATION.findall(error.message)
        layer = _layer_of(model, error.message)
        refusal = _refusal(model, operations[-1] if operations else "an operation", layer)
        raise ValueError(
            f"{refusal}. If the layer has divided variables, it may be enough to give them no layout, so that each "
            "device has them whole."
        ) from error


def _refusal(model: keras.Model, operation: str, layer: str | None) -> str:
    """The error for an operation that DTensor can't run, without a period; `layer` is `None` if it isn't known."""
    where = f"The layer {layer!r}" if layer else f"The model {model.name!r}"
    return (
        f"{where} needs the operation {operation}, for which TensorFlow has no rule on a mesh, or none for how its "
        'inputs are divided. Train with DistributedFit("mirrored", shard="parameters"), which divides weights and runs '
        "any operation"
    )


def _layer_of(model: keras.Model, text: str) -> str | None:
    """The innermost layer whose name scope is in a text, such as an operation's name or an error; or `None`."""
    words = set(re.split(r"[^\w.-]+", text))
    # TensorFlow numbers scopes of the same name.
    words |= {re.sub(r"_\d+$", "", word) for word in words}
    return next((layer.name for layer in reversed(all_layers(model)) if layer.name in words), None)
