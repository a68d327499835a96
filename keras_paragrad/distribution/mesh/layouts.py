"""Layouts: how each variable of a model is sharded over a mesh. Checks them, or derives them from the model."""

import dataclasses
import re
from collections.abc import Iterator

import keras

from keras_paragrad.arguments import quote
from keras_paragrad.compat.layers import REVERSIBLE_EMBEDDINGS
from keras_paragrad.compat.model import all_layers
from keras_paragrad.distribution.mesh.mesh import Mesh
from keras_paragrad.engine.mesh.mesh_tracing import layout_keys
from keras_paragrad.storage.dtensor import Axes

_SHARDED = (keras.layers.Dense, keras.layers.Embedding, *REVERSIBLE_EMBEDDINGS)
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
# The dimension of attention weights that counts heads, by the end of the weight's path.
_HEADS = {f"{name}/{kind}": place for name in ("query", "key", "value") for kind, place in (("kernel", 1), ("bias", 0))}
_HEADS["attention_output/kernel"] = 0
_AXIS = "model"
# Smaller variables of other layers stay whole: steps would gather them anyway.
_LEAST_ELEMENTS = 1024


def axes_of_variables(model: keras.Model, mesh: Mesh) -> dict[int, Axes]:
    """The axes that shard each variable's dimensions, by the variable's `id`."""
    return {id(variable): _checked_axes(variable, mesh) for variable in model.variables}


def _checked_axes(variable: keras.Variable, mesh: Mesh) -> Axes:
    """The axis of the mesh for each dimension of a variable, by the mesh's distribution; refuses invalid layouts."""
    layout = mesh.distribution.get_variable_layout(variable)
    axes, shape = tuple(layout.axes), tuple(variable.shape)
    if layout.device_mesh not in (None, mesh.distribution.device_mesh):
        raise ValueError(
            f"The layout of {variable.path!r} is for another mesh. Create its TensorLayout without a device_mesh."
        )
    if len(axes) != len(shape):
        raise ValueError(
            f"The layout {axes} has {len(axes)} dimensions, and {variable.path!r} has the shape {shape}. Name an axis "
            "or None for each of them."
        )
    unknown = [axis for axis in axes if axis is not None and axis not in mesh.shape]
    if unknown:
        raise ValueError(
            f"The layout {axes} of {variable.path!r} names the axis {unknown[0]!r}, and the mesh has "
            f"{quote(mesh.shape)}. Name one of these, or None."
        )
    named = [axis for axis in axes if axis is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"The layout {axes} of {variable.path!r} names an axis twice. Name each one once.")
    for size, axis in zip(shape, axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"{variable.path!r} has the shape {shape}, and its layout {axes} shards the dimension of size {size} "
                f"over axis {axis!r} of size {mesh.shape[axis]}, which doesn't divide it. Make it a "
                f"multiple of {mesh.shape[axis]}, or write None for that dimension."
            )
    return axes


def variables_kept_sharded(model: keras.Model, axes: dict[int, Axes]) -> set[int]:
    """The `id`s of variables that a step uses sharded; it gathers the others where it reads them."""
    sharded: set[int] = set()
    for layer in all_layers(model):
        by_heads = isinstance(layer, _ATTENTION) and all(
            _by_heads(variable, axes[id(variable)]) for variable in layer.variables
        )
        if by_heads or type(layer) in _SHARDED:
            sharded |= {id(variable) for variable in layer.variables}
    return sharded


def _head_dimension(variable: keras.Variable) -> int | None:
    """The dimension of an attention weight that counts heads; `None` if there is none."""
    return _HEADS.get("/".join(variable.path.split("/")[-2:]))


def _by_heads(variable: keras.Variable, axes: Axes) -> bool:
    """Whether a variable of an attention layer is sharded by heads, or not at all."""
    sharded = [dimension for dimension, axis in enumerate(axes) if axis is not None]
    return not sharded or sharded == [_head_dimension(variable)]


def check_layout_map(model: keras.Model, mesh: Mesh) -> None:
    """Refuses a layout map that divides nothing. Keys with "output" may match outputs of layers, known in a step."""
    paths, keys = [variable.path for variable in model.variables], list(layout_keys(mesh.distribution))
    if keys and not any("output" in key or re.fullmatch(key, path) for key in keys for path in paths):
        raise ValueError(
            f"No key of the layout map matches a variable of {model.name!r}: {', '.join(map(repr, keys))}. The "
            f"variables are {quote(paths[:8])}{' and others' * (len(paths) > 8)}, and a key has to match a whole path, "
            "as '.*kernel' does."
        )


def automatic_layout(model: keras.Model, mesh: Mesh) -> Mesh:
    """The mesh with a distribution for a model: Dense layers column- and row-parallel in pairs, attention by heads.

    Embeddings are sharded by their width, or else by their vocabulary. Other large variables are sharded along their
    last divisible dimension, and gathered in each step; so are attention weights whose heads aren't divisible.

    Shoeybi et al., [Megatron-LM](https://arxiv.org/abs/1909.08053) (2019).
    """
    devices = mesh.device_mesh()
    layout = keras.distribution.LayoutMap(devices)
    if mesh.shape.get(_AXIS, 1) > 1:
        layouts: dict[int, tuple[str, Axes]] = {}
        for variable, dimension in _dimensions_to_shard(model, mesh.shape[_AXIS]):
            axes = tuple(_AXIS if index == dimension else None for index in range(len(variable.shape)))
            layouts.setdefault(id(variable), (variable.path, axes))
        for path, axes in layouts.values():
            layout[re.escape(path)] = axes
    batch = mesh.batch_axis or next(iter(mesh.shape))
    distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name=batch)
    return dataclasses.replace(mesh, distribution=distribution)


def _dimensions_to_shard(model: keras.Model, size: int) -> Iterator[tuple[keras.Variable, int]]:
    """Yields (variable, dimension) pairs to shard; if a variable occurs twice, its first pair wins."""
    # A preceding column-parallel Dense layer, if only elementwise layers follow it.
    column: keras.layers.Dense | None = None
    for layer in all_layers(model):
        if type(layer) is keras.layers.Dense:
            rows, columns = layer.kernel.shape
            column_parallel = columns % size == 0 and not (column is not None and column.units == rows)
            if column_parallel:
                yield from ((variable, len(variable.shape) - 1) for variable in layer.trainable_variables)
            elif rows % size == 0:
                yield layer.kernel, 0
            column = layer if column_parallel else None
        elif isinstance(layer, _ATTENTION):
            column = None
            dimensions = [(variable, _head_dimension(variable)) for variable in layer.trainable_variables]
            heads = [(variable, dimension) for variable, dimension in dimensions if dimension is not None]
            if not any(variable.shape[dimension] % size for variable, dimension in heads):
                yield from heads
        elif layer.trainable_variables and not isinstance(layer, (keras.layers.Activation, keras.layers.Dropout)):
            column = None
    for layer in all_layers(model):
        embeds = isinstance(layer, (keras.layers.Embedding, *REVERSIBLE_EMBEDDINGS))
        for variable in layer.trainable_variables if not isinstance(layer, keras.Model) else ():
            yield from _last_divisible(variable, size, 0 if embeds else _LEAST_ELEMENTS)
    # Including weights that belong to no layer.
    for variable in model.trainable_variables:
        yield from _last_divisible(variable, size, _LEAST_ELEMENTS)


def _last_divisible(variable: keras.Variable, size: int, least_elements: int) -> Iterator[tuple[keras.Variable, int]]:
    """Yields a large enough matrix or tensor with its last dimension that `size` divides, if there is one."""
    dimensions = [index for index, length in enumerate(variable.shape) if length % size == 0]
    if dimensions and len(variable.shape) > 1 and variable.shape.num_elements() >= least_elements:
        yield variable, dimensions[-1]
