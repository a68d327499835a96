"""Selects the *sources* of a derivative, what to differentiate with respect to: inputs, or a layer's output.

Sources are all inputs, or what `wrt` names. Inputs of integers are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np

from keras_paragrad.arguments import check_integer, did_you_mean, quote, refusal
from keras_paragrad.compat.layers import children
from keras_paragrad.inputs.layer_outputs import LayerOutput

# The argument `wrt`: names or numbers of inputs, or the name of a layer, nested as the result is to be.
Wrt: TypeAlias = str | int | Sequence["Wrt"] | Mapping[str, "Wrt"] | None
# Integers, nested as inputs or results are.
Nesting: TypeAlias = int | Sequence["Nesting"] | Mapping[str, "Nesting"]
# The names of a leaf of nested inputs or outputs, or of a layer: its path first.
Spellings: TypeAlias = list[str]


class InputLeaf(NamedTuple):
    """An input.

    Attributes:
        name: What messages call it.
        number: Its place among the flattened inputs.
        dtype: The dtype in which it is differentiated: half precision is raised to float32.
    """

    name: str
    number: int
    dtype: str

    def __str__(self) -> str:
        return f"input {self.name!r}"


class Selection(NamedTuple):
    """The inputs of a model, and the sources to differentiate with respect to: inputs, or a layer's output.

    Attributes:
        structure: The nesting of the inputs, with a number for each.
        names: The name of each input.
        inputs: The inputs to differentiate with respect to.
        layer: The layer's output, in place of inputs.
        nesting: The nesting of the result, with the index of a source at each leaf.
    """

    structure: Nesting
    names: list[str]
    inputs: list[InputLeaf]
    layer: LayerOutput | None
    nesting: Nesting

    @classmethod
    def of(cls, model: keras.Model, structure: Nesting, leaves: list[np.ndarray], wrt: Wrt) -> "Selection":
        """Selects the inputs or the layer that `wrt` names, or all inputs if it is `None`.

        `leaves` are arrays: some rows of each input in `structure`, and perhaps further arrays.
        """
        declared = _declared_inputs(model, structure)
        known = spellings(structure, [getattr(tensor, "name", None) for tensor in declared])
        names = [label or f"input {number}" for number, label in enumerate(labels(known))]
        nesting = structure if wrt is None else wrt
        try:
            flat = keras.tree.flatten(nesting)
            nesting = keras.tree.pack_sequence_as(nesting, list(range(len(flat))))
        except TypeError:  # a dict with unsortable keys
            raise refusal("wrt", wrt, f"one of the inputs {names}, or several, each once") from None
        selected = flat if wrt is None else [_find(model, known, names, item) for item in flat]
        numbers = [source for source in selected if isinstance(source, int)]
        layer = next((source for source in selected if isinstance(source, LayerOutput)), None)
        if not selected or len({*numbers}) < len(numbers) or (layer and len(selected) > 1):
            raise ValueError(
                f"`wrt` is {quote(wrt)}. Name one or more of the inputs {names}, each once, or one layer. For several "
                "layers make a call for each, or name a layer after them."
            )
        dtypes = [_dtypes(*pair) for pair in zip(declared, leaves[: len(names)], strict=True)]
        real = [name for name, pair in zip(names, dtypes, strict=True) if all("float" in dtype for dtype in pair)]
        for number in numbers:
            for dtype in dtypes[number]:
                if "float" not in dtype:
                    raise _dtype_refusal(model, names[number], dtype, real)
        kinds = ["float64" if expected == "float64" else "float32" for expected, _ in dtypes]
        inputs = [InputLeaf(names[number], number, kinds[number]) for number in numbers]
        return cls(structure, names, inputs, layer, nesting)

    def nested(self, results: list[Any]) -> Any:
        """Results, one for each source, nested as `wrt` or the inputs are."""
        return keras.tree.pack_sequence_as(self.nesting, results)


def spellings(structure: Any, names: Sequence[str | None]) -> list[Spellings]:
    """The path of each leaf of a nested structure, and its key in a dict, or else its name in `names`.

    An index in a list is no path: it would be mistaken for the number of an input.
    """
    known = []
    for (path, _), name in zip(keras.tree.flatten_with_path(structure), names, strict=True):
        joined = ["/".join(map(str, path))] if any(isinstance(key, str) for key in path) else []
        name = path[-1] if path and isinstance(path[-1], str) else name
        known.append(joined + [name] * bool(name))
    return known


def indices_of(name: str, known: Sequence[Spellings]) -> list[int]:
    """The indices of what has `name` as its path, or if there are none, of what is spelled so."""
    first = [index for index, names in enumerate(known) if names[:1] == [name]]
    return first or [index for index, names in enumerate(known) if name in names]


def labels(known: Sequence[Spellings]) -> list[str | None]:
    """The shortest spelling that no other has; `None` without one."""
    return [
        next((name for name in reversed(names) if indices_of(name, known) == [index]), None)
        for index, names in enumerate(known)
    ]


def _declared_inputs(model: keras.Model, structure: Nesting) -> list[keras.KerasTensor | None]:
    """The model's symbolic input for each leaf of the structure, by its key or its position; `None` if unknown."""
    tensors = list(getattr(model, "inputs", None) or [])
    by_name = {tensor.name: tensor for tensor in tensors}
    keys = [path[-1] if path else None for path, _ in keras.tree.flatten_with_path(structure)]
    if len(set(keys)) == len(keys) and all(key in by_name for key in keys):
        return [by_name[key] for key in keys]
    return tensors if len(tensors) == len(keys) else [None] * len(keys)


def _layers_of(model: keras.Model) -> tuple[list[keras.layers.Layer], list[Spellings]]:
    """The layers at every depth, each once, and the end of the path of each, from its whole to the name."""

    def walk(layer: keras.layers.Layer, above: tuple[str, ...]) -> Iterator[tuple[keras.layers.Layer, tuple[str, ...]]]:
        for child in children(layer):
            if not isinstance(child, keras.layers.InputLayer):
                yield child, (*above, child.name)
                yield from walk(child, (*above, child.name))

    found: dict[int, tuple[keras.layers.Layer, tuple[str, ...]]] = {}
    for layer, path in walk(model, ()):
        if id(layer) not in found or len(path) < len(found[id(layer)][1]):
            found[id(layer)] = layer, path
    known = [["/".join(path[start:]) for start in range(len(path))] for _, path in found.values()]
    return [layer for layer, _ in found.values()], known


def _find(model: keras.Model, known: list[Spellings], names: list[str], wanted: object) -> int | LayerOutput:
    """Finds what one leaf of `wrt`, `wanted`, names: returns the index of an input, or a layer's output."""
    if not isinstance(wanted, str):
        try:
            return check_integer("wrt", wanted, least=0, most=len(names) - 1)
        except ValueError:
            expected = f"one of the inputs {names}, or its number, or the name of a layer"
            raise refusal("wrt", wanted, expected) from None
    layers, paths = _layers_of(model)
    # "embedding:0" is the first call of a layer, unless a layer has that very name.
    name, _, number = wanted.rpartition(":")
    by_call = bool(name) and number.isdecimal() and not indices_of(wanted, paths)
    inputs = indices_of(wanted, known)
    matching = indices_of(name if by_call else wanted, paths)
    if len(inputs) + len(matching) == 1:
        call = int(number) if by_call else None
        return inputs[0] if inputs else LayerOutput(wanted if call is None else name, layers[matching[0]], call)
    if inputs or matching:
        options = [f"{index} for the input {names[index]}" for index in inputs]
        options += [f"{paths[index][0]!r} for the layer" for index in matching]
        raise ValueError(
            f"`wrt` is {quote(wanted)}, and {len(options)} inputs or layers of {model.name!r} have that name. Write "
            f"wrt={', or '.join(options)}. Give layers with the same path distinct names."
        )
    meant = did_you_mean(wanted, [*names, *(name for spelled in paths for name in (spelled[0], spelled[-1]))])
    unbuilt = "" if model.built else " Layers that build() makes are there once the model was called."
    raise ValueError(
        f"`wrt` is {quote(wanted)}, and {model.name!r} has no input or layer of that name.{meant} The inputs are "
        f"{names}, and the layers {quote([spelled[0] for spelled in paths])}.{unbuilt}"
    )


def _dtypes(declared: keras.KerasTensor | None, leaf: np.ndarray) -> tuple[str, str]:
    """The declared dtype of an input, and the dtype of its values; real values are cast to the declared dtype."""
    expected = keras.backend.standardize_dtype(declared.dtype) if declared is not None else keras.config.floatx()
    return expected, expected if leaf.dtype.kind in "fV" else str(leaf.dtype)


def _dtype_refusal(model: keras.Model, name: str, dtype: str, real: list[str]) -> ValueError:
    """The error for an input that is not real-valued; `real` names the inputs that are."""
    hint = embedding_hint(model)
    if not hint and dtype not in ("bool", "object") and not dtype.startswith(("<U", "|S")):
        hint = "If its values are numbers and not codes, write x.astype('float32')."
    leave_out = f" To exclude it, write wrt={real}." if real else ""
    return ValueError(f"Input {name!r} is {dtype}, and only real-valued inputs have a gradient. {hint}{leave_out}")


def embedding_hint(model: keras.Model) -> str:
    """How to differentiate with respect to the outputs of a model's embeddings; empty without embeddings."""
    layers, paths = _layers_of(model)
    unique = [label or spelled[0] for label, spelled in zip(labels(paths), paths, strict=True)]
    names = [name for name, layer in zip(unique, layers, strict=True) if isinstance(layer, keras.layers.Embedding)]
    wrt = " or ".join(f"wrt={name!r}" for name in names)
    return f"To differentiate with respect to what the embedding gives, write {wrt}." if names else ""
