"""Selects the inputs to differentiate: all, or those that `wrt` names. Inputs without a gradient are refused."""

import contextlib
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.arguments import check_choice, check_integer, refusal, shown
from keras_paragrad.inputs.refusal import integer_refusal


class Selection(NamedTuple):
    """The inputs of a model, and those among them to differentiate with respect to.

    Attributes:
        structure: The nesting of the inputs, with a number for each.
        names: The name of each.
        chosen: The numbers of those that are differentiated.
        dtypes: The dtype that each of those is differentiated in.
        nesting: The nesting of the result, with an input's number in each place.
    """

    structure: Any
    names: list[str]
    chosen: list[int]
    dtypes: list[str]
    nesting: Any

    @classmethod
    def of(cls, model: keras.Model, structure: Any, leaves: list[np.ndarray], wrt: Any) -> "Selection":
        """Selects the inputs that `wrt` names: all if it is `None`, otherwise a name, a number or a list of them."""
        declared = _declared(model, structure)
        names = _names(structure, declared)
        nesting = structure if wrt is None else _numbers(wrt, names)
        chosen = keras.tree.flatten(nesting)
        if not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"`wrt` is {shown(wrt)}. Name one or more of the inputs {names}, each once.")
        found = [_dtypes(*each) for each in zip(declared, leaves[: len(names)], strict=True)]
        real = [name for name, pair in zip(names, found, strict=True) if all("float" in dtype for dtype in pair)]
        for number in chosen:
            for dtype in found[number]:
                if "float" not in dtype:
                    raise ValueError(integer_refusal(model, names[number], dtype, real))
        # Half precision is raised to float32.
        dtypes = ["float64" if found[number][0] == "float64" else "float32" for number in chosen]
        return cls(structure, names, chosen, dtypes, nesting)

    def nested(self, results: list) -> Any:
        """Results, one for each chosen input, nested as `wrt` or the inputs are."""
        return keras.tree.pack_sequence_as(self.nesting, results)


def _declared(model: keras.Model, structure: Any) -> list:
    """The symbolic input that belongs to each place of the structure, or `None`."""
    tensors = list(getattr(model, "inputs", None) or [])
    by_name = {tensor.name: tensor for tensor in tensors}
    paths = [path for path, _ in keras.tree.flatten_with_path(structure)]
    if all(path and path[-1] in by_name for path in paths):
        return [by_name[path[-1]] for path in paths]
    return tensors if len(tensors) == len(paths) else [None] * len(paths)


def _names(structure: Any, declared: list) -> list[str]:
    paths = [path for path, _ in keras.tree.flatten_with_path(structure)]
    return [
        path[-1] if path and isinstance(path[-1], str) else getattr(tensor, "name", f"input {number}")
        for number, (path, tensor) in enumerate(zip(paths, declared, strict=True))
    ]


def _numbers(wrt: Any, names: list[str]) -> Any:
    """The inputs' numbers, nested as their names are."""
    try:
        leaves = keras.tree.flatten(wrt)
        return keras.tree.pack_sequence_as(wrt, [_number(name, names) for name in leaves])
    except TypeError:  # a dict with unsortable keys
        raise refusal("wrt", wrt, f"one of the inputs {names}, or several, each once") from None


def _number(name: Any, names: list[str]) -> int:
    with contextlib.suppress(ValueError):
        return names.index(check_choice("wrt", name, names))
    try:
        return check_integer("wrt", name, least=0, most=len(names) - 1)
    except ValueError:
        raise refusal("wrt", name, f"one of the inputs {names}, or its number") from None


def _dtypes(declared: Any, leaf: np.ndarray) -> tuple[str, str]:
    """The dtype that the model declares for an input, and that of the given values; real ones count as declared."""
    expected = keras.backend.standardize_dtype(declared.dtype) if declared is not None else keras.config.floatx()
    return expected, expected if leaf.dtype.kind in "fV" else str(leaf.dtype)
