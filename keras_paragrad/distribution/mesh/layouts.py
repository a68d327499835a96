"""How each variable of a model is divided over a mesh, and what can't be."""

import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_paragrad.arguments import shown
from keras_paragrad.compat.model import all_layers
from keras_paragrad.distribution.mesh.mesh import Mesh
from keras_paragrad.engine.mesh.tracing import layout_keys

Axes = tuple[str | None, ...]
_DIVIDED = (keras.layers.Dense, keras.layers.Embedding, keras.layers.ReversibleEmbedding)
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
# Of an attention's weights, by the end of their paths, the dimension that counts heads.
_HEADS = {f"{name}/{kind}": place for name in ("query", "key", "value") for kind, place in (("kernel", 1), ("bias", 0))}
_HEADS["attention_output/kernel"] = 0
_AXIS = "model"
# Of what isn't a Dense layer, an embedding or attention, smaller variables stay whole: steps gather them anyway.
_LEAST_ELEMENTS = 1024


def layouts_of(model: keras.Model, mesh: Mesh) -> dict[int, Axes]:
    """What the dimensions of each of a model's variables are divided along, by the `id` of the variable."""
    return {id(variable): _layout(variable, mesh) for variable in model.variables}


def _layout(variable: keras.Variable, mesh: Mesh) -> Axes:
    layout = mesh.distribution.get_variable_layout(variable)
    axes, shape = tuple(layout.axes), tuple(variable.shape)
    on = layout.device_mesh
    if on is not None and on is not mesh.distribution.device_mesh:
        raise ValueError(f"The layout of {variable.path!r} is for another mesh. Give its TensorLayout no device_mesh.")
    if len(axes) != len(shape):
        raise ValueError(
            f"The layout {axes} has {len(axes)} dimensions, and {variable.path!r} has the shape {shape}. Name an axis "
            "or None for each of them."
        )
    unknown = [axis for axis in axes if axis is not None and axis not in mesh.shape]
    if unknown:
        raise ValueError(
            f"The layout {axes} of {variable.path!r} names the axis {unknown[0]!r}, and the mesh has "
            f"{shown(mesh.shape)}. Name one of these, or None."
        )
    named = [axis for axis in axes if axis is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"The layout {axes} of {variable.path!r} names an axis twice. Name each one once.")
    for size, axis in zip(shape, axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"{variable.path!r} has the shape {shape}, and its layout {axes} divides {size} by the axis {axis!r}, "
                f"of {mesh.shape[axis]}. Give it a multiple of {mesh.shape[axis]} units, or write None for that "
                "dimension."
            )
    return axes


def computed_divided(model: keras.Model, layouts: dict[int, Axes]) -> set[int]:
    """The `id`s of variables that a step computes with as they are divided; it gathers others where it reads them."""
    found: set[int] = set()
    for layer in all_layers(model):
        by_heads = isinstance(layer, _ATTENTION) and all(_by_heads(each, layouts[id(each)]) for each in layer.variables)
        if by_heads or type(layer) in _DIVIDED:
            found |= {id(variable) for variable in layer.variables}
    return found


def _by_heads(variable: keras.Variable, axes: Axes) -> bool:
    """Whether a variable of an attention layer is divided by heads, or not at all."""
    divided = [place for place, axis in enumerate(axes) if axis is not None]
    return not divided or divided == [_HEADS.get("/".join(variable.path.split("/")[-2:]))]


def check_patterns(model: keras.Model, mesh: Mesh, outputs: Iterable[str] | None) -> None:
    """Warns of a layout map of which a key matches nothing, as that of a family of models may, and refuses others."""
    paths = [variable.path for variable in model.variables]
    known = [*paths, *(outputs or ())]
    keys = list(layout_keys(mesh.distribution))
    left = [key for key in keys if not any(key == path or re.fullmatch(key, path) for path in known)]
    if outputs is None:
        # These may match the output of a layer, once a step is traced.
        left = [key for key in left if "output" not in key]
    elif not any("output" in key for key in left):
        # They have been named when the outputs weren't known yet.
        return
    if not left:
        return
    found = (
        f"The variables of {model.name!r} are {shown(paths[:8])}{' and others' * (len(paths) > 8)}, and a key has to "
        f"match a whole path{_longer(left, known)}."
    )
    named = ", ".join(map(repr, left))
    if len(left) == len(keys):
        raise ValueError(f"No key of the layout map matches a variable or the output of a layer: {named}. {found}")
    many = len(left) > 1
    warnings.warn(
        f"{'These keys' if many else 'A key'} of the layout map match{'' if many else 'es'} no variable or output of a "
        f"layer, and divide{'' if many else 's'} nothing: {named}. {found}",
        stacklevel=2,
    )


def _longer(keys: list[str], known: list[str]) -> str:
    """What to write instead of keys that match a part of a path."""
    for key in keys:
        for longer in (f".*{key}", f"{key}.*", f".*{key}.*"):
            if any(re.fullmatch(longer, path) for path in known):
                return f": write {longer!r} instead of {key!r}"
    return ""


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
    if mesh.shape.get(_AXIS, 1) > 1:
        found: dict[int, tuple[str, Axes]] = {}
        for variable, place in _divisions(model, mesh.shape[_AXIS]):
            axes = tuple(_AXIS if index == place else None for index in range(len(variable.shape)))
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
        elif isinstance(layer, _ATTENTION):
            column = None
            places = [(each, _HEADS.get("/".join(each.path.split("/")[-2:]))) for each in layer.trainable_variables]
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
