"""What Keras does while a step on a mesh is traced: outputs are laid out, and loops unrolled."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import distribution_lib

from keras_paragrad.compat.layers import attributes
from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.mesh.equivalents import with_equivalents
from keras_paragrad.engine.mesh.errors import check_operations
from keras_paragrad.engine.mesh.pinning import pinned_between_layers
from keras_paragrad.storage.dtensor import computing_on_mesh, relayout


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
