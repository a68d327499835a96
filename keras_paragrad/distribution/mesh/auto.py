"""A layout that is found from a model's structure."""

import re
from collections.abc import Iterator
from typing import Any

import keras

from keras_paragrad._keras.objects.model import all_layers
from keras_paragrad.distribution.mesh.layouts import ATTENTION, HEADS, Axes
from keras_paragrad.distribution.mesh.mesh import Mesh

AXIS = "model"
# Of what isn't a Dense layer, an embedding or attention, smaller variables stay whole: steps gather them anyway.
_LEAST_ELEMENTS = 1024


def with_automatic_layout(model: keras.Model, mesh: Mesh) -> Mesh:
    """A mesh with a distribution for a model: pairs of Dense layers by columns and rows, attention by heads.

    Embeddings are divided by their width, or by their vocabulary where that doesn't divide. What else is large is
    divided along its last dimension, or its first, and gathered in each step. So are attention's weights whose heads
    don't divide.

    Shoeybi et al., [Megatron-LM](https://arxiv.org/abs/1909.08053) (2019).

    Args:
        model: A built model.
        mesh: A mesh without a distribution.
    """
    devices = mesh.device_mesh()
    layout = keras.distribution.LayoutMap(devices)
    if mesh.shape.get(AXIS, 1) > 1:
        found: dict[int, tuple[str, Axes]] = {}
        for variable, place in _divisions(model, mesh.shape[AXIS]):
            axes = tuple(AXIS if index == place else None for index in range(len(variable.shape)))
            found.setdefault(id(variable), (variable.path, axes))
        for path, axes in found.values():
            layout[re.escape(path)] = axes
    batch = mesh.batch_axis or next(iter(mesh.shape))
    distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name=batch)
    return Mesh(mesh.shape, mesh.devices, mesh.batch_axis, distribution, mesh.workers, mesh.worker)


def _divisions(model: keras.Model, size: int) -> Iterator[tuple[keras.Variable, int]]:
    """Variables to divide, each with the dimension, those of the best reason first."""
    column: Any = None
    for layer in all_layers(model):
        if type(layer) is keras.layers.Dense:
            wide, tall = layer.kernel.shape[1] % size == 0, layer.kernel.shape[0] % size == 0
            pair = column is not None and column.units == layer.kernel.shape[0]
            if wide and not pair:
                yield from ((variable, len(variable.shape) - 1) for variable in layer.trainable_variables)
            elif tall:
                yield layer.kernel, 0
            column = layer if wide and not pair else None
        elif isinstance(layer, ATTENTION):
            column = None
            places = [(each, HEADS.get("/".join(each.path.split("/")[-2:]))) for each in layer.trainable_variables]
            if all(place is None or variable.shape[place] % size == 0 for variable, place in places):
                yield from ((variable, place) for variable, place in places if place is not None)
        elif layer.trainable_variables and not _passes(layer):
            column = None
    for layer in all_layers(model):
        embeds = isinstance(layer, (keras.layers.Embedding, keras.layers.ReversibleEmbedding))
        for variable in layer.trainable_variables if not isinstance(layer, keras.Model) else ():
            dimensions = [place for place, length in enumerate(variable.shape) if length % size == 0]
            large = len(variable.shape) > 1 and (embeds or variable.shape.num_elements() >= _LEAST_ELEMENTS)
            if dimensions and large:
                yield variable, dimensions[-1]
    for variable in model.trainable_variables:
        # Weights of the model's own.
        dimensions = [place for place, length in enumerate(variable.shape) if length % size == 0]
        if dimensions and len(variable.shape) > 1 and variable.shape.num_elements() >= _LEAST_ELEMENTS:
            yield variable, dimensions[-1]


def _passes(layer: keras.layers.Layer) -> bool:
    """Whether what a Dense layer gives may pass through a layer to the next one."""
    return isinstance(layer, (keras.layers.Activation, keras.layers.Dropout))
