"""How each variable of a model is divided over a mesh, and what can't be."""

import re
from collections.abc import Iterable

import keras

from keras_paragrad._keras.mesh.tracing import layout_keys
from keras_paragrad._keras.objects.model import all_layers
from keras_paragrad.arguments import shown
from keras_paragrad.distribution.mesh.mesh import Mesh

Axes = tuple[str | None, ...]
_DIVIDED = (keras.layers.Dense, keras.layers.Embedding, keras.layers.ReversibleEmbedding)
ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
# Of an attention's weights, by the end of their paths, the dimension that counts heads.
HEADS = {f"{name}/{kind}": place for name in ("query", "key", "value") for kind, place in (("kernel", 1), ("bias", 0))}
HEADS["attention_output/kernel"] = 0


def layouts_of(model: keras.Model, mesh: Mesh) -> dict[int, Axes]:
    """What the dimensions of each of a model's variables are divided along, by the `id` of the variable.

    Raises:
        ValueError: A layout doesn't fit its variable or the mesh. The message names both.
    """
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
    """The `id`s of variables with which a step computes as they are divided: it gathers all others where it reads them.

    Args:
        model: A built model.
        layouts: What its variables are divided along, by their `id`s.
    """
    found: set[int] = set()
    for layer in all_layers(model):
        by_heads = isinstance(layer, ATTENTION) and all(_by_heads(each, layouts[id(each)]) for each in layer.variables)
        if by_heads or type(layer) in _DIVIDED:
            found |= {id(variable) for variable in layer.variables}
    return found


def _by_heads(variable: keras.Variable, axes: Axes) -> bool:
    """Whether a variable of an attention layer is divided by heads, or not at all."""
    divided = [place for place, axis in enumerate(axes) if axis is not None]
    return not divided or divided == [HEADS.get("/".join(variable.path.split("/")[-2:]))]


def check_patterns(model: keras.Model, mesh: Mesh, outputs: Iterable[str] | None) -> None:
    """Refuses a layout map of which a key matches nothing.

    Args:
        model: A built model.
        mesh: The mesh.
        outputs: The paths of layers' outputs, or `None` while they aren't known.

    Raises:
        ValueError: The message names the key, and what there is.
    """
    paths = [variable.path for variable in model.variables]
    known = [*paths, *(outputs or ())]
    for key in layout_keys(mesh.distribution):
        if any(key == path or re.fullmatch(key, path) for path in known):
            continue
        if outputs is None and "output" in key:
            continue
        raise ValueError(
            f"The key {key!r} of the layout map matches no variable of {model.name!r}, nor the output of a layer. Its "
            f"variables are {shown(paths[:8])}{' and others' * (len(paths) > 8)}. A key matches a whole path: write "
            f"{'.*' + key!r}, say."
        )
