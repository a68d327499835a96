"""Selects the inputs to differentiate: all, or those that `wrt` names. Inputs without a gradient are refused."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np

from keras_paragrad.arguments import check_choice, check_integer, quote, refusal
from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.step.segments import calls_of, functional_of

# The argument `wrt`: names or numbers of inputs, nested as the result is to be.
Wrt: TypeAlias = str | int | Sequence["Wrt"] | Mapping[str, "Wrt"] | None
# Numbers of inputs, nested as these are.
Nesting: TypeAlias = int | Sequence["Nesting"] | Mapping[str, "Nesting"]


class Selection(NamedTuple):
    """The inputs of a model, and those that are differentiated.

    Attributes:
        structure: The nesting of the inputs, with a number for each.
        names: The name of each.
        numbers: The numbers of those that are differentiated.
        dtypes: The dtype in which each of those is differentiated.
        nesting: The nesting of the result, with an input's number at each leaf.
    """

    structure: Nesting
    names: list[str]
    numbers: list[int]
    dtypes: list[str]
    nesting: Nesting

    @classmethod
    def of(cls, model: keras.Model, structure: Nesting, leaves: list[np.ndarray], wrt: Wrt) -> "Selection":
        """Selects the inputs that `wrt` names: all if it is `None`, otherwise a name, a number or a list of them."""
        declared = _declared_inputs(model, structure)
        names = _input_names(structure, declared)
        nesting = structure if wrt is None else _input_numbers(wrt, names)
        numbers = keras.tree.flatten(nesting)
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(f"`wrt` is {quote(wrt)}. Name one or more of the inputs {names}, each once.")
        pairs = [_dtypes(*each) for each in zip(declared, leaves[: len(names)], strict=True)]
        real = [name for name, pair in zip(names, pairs, strict=True) if all("float" in dtype for dtype in pair)]
        for number in numbers:
            for dtype in pairs[number]:
                if "float" not in dtype:
                    raise _dtype_refusal(model, names[number], dtype, real)
        # Half precision is raised to float32.
        dtypes = ["float64" if pairs[number][0] == "float64" else "float32" for number in numbers]
        return cls(structure, names, numbers, dtypes, nesting)

    def nested(self, results: list[Any]) -> Any:
        """Results, one for each differentiated input, nested as `wrt` or the inputs are."""
        return keras.tree.pack_sequence_as(self.nesting, results)


def _declared_inputs(model: keras.Model, structure: Nesting) -> list[keras.KerasTensor | None]:
    """The symbolic input for each leaf of the structure, or `None`."""
    tensors = list(getattr(model, "inputs", None) or [])
    by_name = {tensor.name: tensor for tensor in tensors}
    paths = [path for path, _ in keras.tree.flatten_with_path(structure)]
    if all(path and path[-1] in by_name for path in paths):
        return [by_name[path[-1]] for path in paths]
    return tensors if len(tensors) == len(paths) else [None] * len(paths)


def _input_names(structure: Nesting, declared: list[keras.KerasTensor | None]) -> list[str]:
    """The name of each input: its key, that of its tensor, or its number."""
    paths = [path for path, _ in keras.tree.flatten_with_path(structure)]
    return [
        path[-1] if path and isinstance(path[-1], str) else getattr(tensor, "name", f"input {number}")
        for number, (path, tensor) in enumerate(zip(paths, declared, strict=True))
    ]


def _input_numbers(wrt: Wrt, names: list[str]) -> Nesting:
    """The numbers of the inputs that `wrt` names, nested as it is."""
    try:
        return keras.tree.pack_sequence_as(wrt, [_input_number(each, names) for each in keras.tree.flatten(wrt)])
    except TypeError:  # a dict with unsortable keys
        raise refusal("wrt", wrt, f"one of the inputs {names}, or several, each once") from None


def _input_number(name: object, names: list[str]) -> int:
    """The number of an input that is named by name or number."""
    with contextlib.suppress(ValueError):
        return names.index(check_choice("wrt", name, names))
    try:
        return check_integer("wrt", name, least=0, most=len(names) - 1)
    except ValueError:
        raise refusal("wrt", name, f"one of the inputs {names}, or its number") from None


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
    embeddings = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.Embedding)]
    if not embeddings:
        return ""
    functional = functional_of(model)
    # An embedding that is shared with the output layer also maps vectors to tokens, without adding an axis.
    calls = [
        call
        for call in (calls_of(functional) if functional else [])
        if _contains_embedding(call.operation)
        and len(call.outputs) == 1
        and len(call.outputs[0].shape) == len(call.input_tensors[0].shape) + 1
    ]
    vectors = [_expression(model, call.outputs[0]) for call in calls]
    if not vectors or None in vectors:
        return (
            f"Differentiate with respect to the output of the embedding {embeddings[0].name!r}: build a keras.Model "
            "of the layers after it, and call this function on that."
        )
    # The inputs are passed on too, as masks are computed from them.
    inner = f"[{', '.join(map(str, vectors))}, *model.inputs]"
    names = ", ".join(dict.fromkeys(repr(call.operation.name) for call in calls))
    ends = ("inputs", "outputs") if isinstance(model, keras.Sequential) else ("input", "output")
    wrt = 0 if len(vectors) == 1 else list(range(len(vectors)))
    return (
        f"Differentiate with respect to the output of the embedding {names}: build before = "
        f"keras.Model(model.{ends[0]}, {inner}) and after = keras.Model({inner}, model.{ends[1]}), and call this "
        "function on `after`, with "
        f"before.predict(x) as its inputs and wrt={wrt}."
    )


def _contains_embedding(operation: keras.Operation) -> bool:
    """Whether an operation is an embedding, or a layer around one, such as one that adds positions."""
    return isinstance(operation, keras.layers.Embedding) or (
        isinstance(operation, keras.layers.Layer)
        and not isinstance(operation, keras.Model)
        and any(isinstance(layer, keras.layers.Embedding) for layer in all_layers(operation))
    )


def _expression(model: keras.Model, tensor: keras.KerasTensor) -> str | None:
    """Python code for a tensor of a Functional model, by an operation that returns or takes it; or `None`."""
    operations = getattr(model, "operations", model.layers)
    for side in ("output", "input"):
        for number, operation in enumerate(operations):
            code = f"get_layer({operation.name!r})" if operation in model.layers else f"operations[{number}]"
            tensors = getattr(operation, side, None)
            if tensors is tensor:
                return f"model.{code}.{side}"
            if isinstance(tensors, (list, tuple)):
                for index, each in enumerate(tensors):
                    if each is tensor:
                        return f"model.{code}.{side}[{index}]"
    return None
