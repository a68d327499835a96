"""The content of a backup: variables, and the state of callbacks as JSON that restores its types, in bytes."""

import io
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.plain_text import read_json

_DEEPEST = 64
_JSON_TYPES = (type(None), bool, int, float, str)
# Integers from here on are stored in hexadecimal: Python refuses to parse long ones in decimal.
_LONGEST_INT = 1 << 63
STORABLE = (
    "A backup can hold None, bool, int, float, str and bytes, NumPy arrays and scalars that contain no Python objects, "
    "and lists, tuples and dicts of these."
)


class UnstorableError(TypeError):
    """A value can't be backed up because it would not be restored exactly."""


def encode(value: Any, arrays: list[np.ndarray], where: str, depth: int = 0) -> Any:
    """Encodes a value as JSON; types that JSON lacks become an object with one key, the type.

    Example:

    >>> import json
    >>> arrays = []
    >>> text = json.dumps(encode({1: (2.5, b"text")}, arrays, "a state"))
    >>> decode(json.loads(text), arrays)
    {1: (2.5, b'text')}
    """
    if depth > _DEEPEST:
        raise UnstorableError(f"{where} is nested deeper than {_DEEPEST} levels, or contains itself.")
    kind = type(value)
    if kind is int and abs(value) >= _LONGEST_INT:
        return {"int": hex(value)}
    if kind in _JSON_TYPES:
        return value
    if kind in (list, tuple):
        items = [encode(item, arrays, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        keys = [encode(key, arrays, f"the key {key!r:.40} of {where}", depth + 1) for key in value]
        items = [encode(item, arrays, f"{where}[{key!r:.40}]", depth + 1) for key, item in value.items()]
        return {"dict": list(zip(keys, items, strict=True))}
    if kind is bytes:
        return {"bytes": _append(np.frombuffer(value, np.uint8), arrays)}
    if (kind is np.ndarray or isinstance(value, np.generic)) and is_storable(np.asarray(value).dtype):
        return {"array" if kind is np.ndarray else "scalar": _append(np.asarray(value), arrays)}
    text = " ".join(repr(value).split())
    raise UnstorableError(f"{where} is {text if len(text) < 80 else text[:80] + '...'}, of type {kind.__name__}.")


def _append(array: np.ndarray, arrays: list[np.ndarray]) -> int:
    arrays.append(array)
    return len(arrays) - 1


def decode(encoded: Any, arrays: list[np.ndarray]) -> Any:
    """The value that `encode` was given, from what it returned and appended to `arrays`."""
    if isinstance(encoded, list):
        return [decode(item, arrays) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    if kind == "int":
        return int(content, 16)
    if kind == "tuple":
        return tuple(decode(item, arrays) for item in content)
    if kind == "dict":
        return {decode(key, arrays): decode(value, arrays) for key, value in content}
    array = arrays[content]
    return array.tobytes() if kind == "bytes" else array if kind == "array" else array[()]


def copy_state(state: Any, where: str) -> Any:
    """A copy of a callback's state, which the callback doesn't change."""
    arrays: list[np.ndarray] = []
    encoded = encode(state, arrays, where)
    return decode(encoded, [array.copy() for array in arrays])


def is_storable(dtype: np.dtype) -> bool:
    """Whether a NumPy archive, together with the dtype's name, preserves a dtype."""
    if dtype.hasobject:
        return False
    return dtype_name(dtype) is not None or np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype


def dtype_name(dtype: np.dtype) -> str | None:
    """The name of a dtype that NumPy archives write as raw bytes, such as bfloat16; else `None`."""
    return dtype.name if dtype.names is None and np.dtype(dtype.str) != dtype else None


class VariableInShards(NamedTuple):
    """A variable whose value is in archives of shards; concatenated, these are the flat and padded variable.

    `size` is the number of elements of all shards, and `member` names the array of bytes in each archive.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    member: str


Values = dict[str, list[np.ndarray | VariableInShards]]
_DESCRIPTION = "description"


class Content(NamedTuple):
    """The state to resume from.

    Attributes:
        values: The variables' values, by section: `"model"`, `"optimizer"` and `"metrics"`.
        names: The variables' names, in the same order.
        callbacks: The state of each callback that has any.
        steps: Number of batches per epoch, or `None` if unknown.
        built: For each optimizer of a model with its own `train_step`, the numbers of the model's variables that it was
            built with, if it was; `None` for other models.
        kernels: What computed it, of deterministic training: see `describe_kernels`.
    """

    values: Values
    names: dict[str, list[str]]
    callbacks: dict[str, Any]
    steps: int | None = None
    built: Sequence[Sequence[int] | None] | None = None
    kernels: dict[str, str] | None = None

    def arrays(self) -> list[tuple[str, np.ndarray]]:
        """The content as named arrays, for an archive."""
        all_values = [value for values in self.values.values() for value in values]
        arrays = [value for value in all_values if not isinstance(value, VariableInShards)]
        # Arrays of callbacks follow the arrays of whole variables. A whole variable has `None` in `cut`.
        cut = [
            (*each[:1], each.dtype.name, *each[2:]) if isinstance(each, VariableInShards) else None
            for each in all_values
        ]
        callbacks = {name: encode(state, arrays, state_in_words(name)) for name, state in self.callbacks.items()}
        dtypes = [dtype_name(array.dtype) for array in arrays]
        described = {**self._asdict(), "values": None, "callbacks": callbacks, "cut": cut, "dtypes": dtypes}
        description = np.frombuffer(json.dumps(described).encode(), np.uint8)
        return [(_DESCRIPTION, description), *((str(index), array) for index, array in enumerate(arrays))]

    @classmethod
    def from_archive(cls, packed: bytes) -> "Content":
        """Reads an archive of what `arrays` returned."""
        with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
            fields = read_json(archive[_DESCRIPTION].tobytes())
            # NumPy does not know bfloat16 and similar types, and returns raw bytes.
            arrays = [
                archive[str(index)].view(np.dtype(name)) if name else archive[str(index)]
                for index, name in enumerate(fields.pop("dtypes"))
            ]
        whole, cut = iter(arrays), iter(fields.pop("cut"))
        fields["values"] = {
            section: [_value(next(cut), whole) for _ in names] for section, names in fields["names"].items()
        }
        fields["callbacks"] = {name: decode(state, arrays) for name, state in fields["callbacks"].items()}
        return cls(**fields)

    def check_fits(self, section: str, variables: list[keras.Variable], source: object) -> None:
        """Raises a `ValueError` that names the first variable without a matching value."""
        required = [(variable.path, tuple(variable.shape), variable.dtype) for variable in variables]
        values = zip(self.names[section], self.values[section], strict=True)
        stored = [(name, value.shape, value.dtype.name) for name, value in values]
        for expected, saved in itertools.zip_longest(required, stored):
            if expected is None or saved is None or expected[1:] != saved[1:]:
                raise ValueError(
                    f"{source} has backups of another model: the {section} of this one has "
                    f"{_describe_variable(expected)}, where they have {_describe_variable(saved)}. Train the model "
                    "that they were made from, or use another directory to start from scratch."
                )


def state_in_words(callback: str) -> str:
    """The name of a callback's state in errors."""
    return f"The state of the callback {callback}"


def _value(cut: list[Any] | None, whole: Iterator[np.ndarray]) -> np.ndarray | VariableInShards:
    """A variable's value: in shards as `cut` describes them, or the next of the whole ones if it is `None`."""
    if cut is None:
        return next(whole)
    shape, dtype, size, member = cut
    return VariableInShards(tuple(shape), np.dtype(dtype), size, member)


def _describe_variable(variable: tuple[str, Sequence[int], str] | None) -> str:
    return f"{variable[0]} of shape {variable[1]} and {variable[2]}" if variable else "nothing"
