"""The content of a backup: variables, and the state of callbacks as JSON that restores its types, in bytes."""

import io
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.distribution.checkpoint.file_format import ShardFile
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


def encode(value: object, arrays: list[np.ndarray], where: str) -> Any:
    """Encodes a value as JSON; types that JSON lacks become an object with one key, the type.

    Args:
        value: `None`, a bool, a number, a string, bytes, a NumPy array or scalar; or lists, tuples and dicts of these,
            whose keys may be any hashable.
        arrays: Arrays and bytes are appended to it.
        where: A description of the value, for errors.

    Returns:
        Input for `json.dumps`.

    Raises:
        UnstorableError: The value, or one nested in it, is of another type, or nested too deeply.

    Example:

    >>> import json
    >>> arrays = []
    >>> text = json.dumps(encode({1: (2.5, b"text")}, arrays, "a state"))
    >>> decode(json.loads(text), arrays)
    {1: (2.5, b'text')}
    """
    return _encode(value, arrays, where, 0)


def _encode(value: Any, arrays: list[np.ndarray], where: str, depth: int) -> Any:
    """A value as JSON, with its arrays and bytes appended to `arrays`."""
    if depth > _DEEPEST:
        raise UnstorableError(f"{where} is nested deeper than {_DEEPEST} levels, or contains itself.")
    kind = type(value)
    if kind is int and abs(value) >= _LONGEST_INT:
        return {"int": hex(value)}
    if kind in _JSON_TYPES:
        return value
    if kind in (list, tuple):
        items = [_encode(item, arrays, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        return {"dict": [_pair(key, item, arrays, where, depth + 1) for key, item in value.items()]}
    if kind is bytes:
        return {"bytes": _append(np.frombuffer(value, np.uint8), arrays)}
    if (kind is np.ndarray or isinstance(value, np.generic)) and is_storable(np.asarray(value).dtype):
        return {"array" if kind is np.ndarray else "scalar": _append(np.asarray(value), arrays)}
    text = " ".join(repr(value).split())
    raise UnstorableError(f"{where} is {text if len(text) < 80 else text[:80] + '...'}, of type {kind.__name__}.")


def _pair(key: object, value: object, arrays: list[np.ndarray], where: str, depth: int) -> list[object]:
    return [
        _encode(key, arrays, f"the key {key!r:.40} of {where}", depth),
        _encode(value, arrays, f"{where}[{key!r:.40}]", depth),
    ]


def _append(array: np.ndarray, arrays: list[np.ndarray]) -> int:
    arrays.append(array)
    return len(arrays) - 1


def decode(encoded: Any, arrays: list[np.ndarray]) -> Any:
    """Decodes the result of `encode`.

    Args:
        encoded: The JSON that `encode` returned.
        arrays: The arrays that `encode` appended to.
    """
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
    """A copy of a callback's state, which the callback doesn't change.

    Raises:
        UnstorableError: It has a value that a backup can't store.
    """
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


DESCRIPTION = "description"


class VariableInShards(NamedTuple):
    """A variable whose value is in files of shards.

    Attributes:
        shape: The shape of the whole variable.
        dtype: Its dtype.
        size: Number of elements of a replica's shard; concatenated, shards are the flat and padded variable.
        begin: Offset in bytes of a replica's shard in a file of one replica. Files of `n` replicas have `n` shards of a
            variable after one another, from offset `n * begin`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    begin: int

    def described(self) -> list[Any]:
        """The attributes as JSON, which `_value` reads."""
        return [list(self.shape), self.dtype.name, self.size, self.begin]


Values = dict[str, list[np.ndarray | VariableInShards]]


class Content(NamedTuple):
    """The state to resume from.

    Attributes:
        values: The variables' values, by section: `"model"`, `"optimizer"` and `"metrics"`.
        names: The variables' names, in the same order.
        callbacks: The state of each callback that has any.
        steps: Number of batches per epoch, or `None` if unknown.
        shards: The files of shards, one for each worker.
        replicas: Number of replicas of these workers.
        built: For each optimizer of a model with its own `train_step`, the numbers of the model's variables that it was
            built with, if it was; `None` for other models.
        kernels: What computed it, of deterministic training: see `describe_kernels`.
    """

    values: Values
    names: dict[str, list[str]]
    callbacks: dict[str, Any]
    steps: int | None = None
    shards: Sequence[ShardFile] = ()
    replicas: int = 1
    built: Sequence[Sequence[int] | None] | None = None
    kernels: dict[str, str] | None = None

    def to_bytes(self, shards: Sequence[ShardFile] = ()) -> bytes:
        """The content as a NumPy archive, which holds no code.

        Args:
            shards: The files of shards, one for each worker.

        Raises:
            UnstorableError: A callback's state has a value that a backup can't store.
        """
        all_values = [value for values in self.values.values() for value in values]
        arrays = [value for value in all_values if not isinstance(value, VariableInShards)]
        callbacks = {name: encode(state, arrays, state_in_words(name)) for name, state in self.callbacks.items()}
        described: dict[str, Any] = {
            "names": self.names,
            "callbacks": callbacks,
            "steps": self.steps,
            "dtypes": [dtype_name(array.dtype) for array in arrays],
        }
        if shards:
            # For each variable, where its shards are, or `None` if it is whole.
            cut = [value.described() if isinstance(value, VariableInShards) else None for value in all_values]
            described["shards"] = {"files": shards, "replicas": self.replicas, "cut": cut}
        if self.built is not None:
            described["built"] = self.built
        if self.kernels is not None:
            described["kernels"] = self.kernels
        description = np.frombuffer(json.dumps(described).encode(), np.uint8)
        with io.BytesIO() as buffer:
            named: dict[str, Any] = {str(index): array for index, array in enumerate(arrays)}
            named[DESCRIPTION] = description
            np.savez(buffer, **named)
            return buffer.getvalue()

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Content":
        """Reads what `to_bytes` wrote."""
        with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
            described = _read_description(archive)
            arrays = [_view_dtype(archive[str(index)], name) for index, name in enumerate(described["dtypes"])]
        shards = described.get("shards", {"files": [], "replicas": 1, "cut": itertools.repeat(None)})
        # The arrays of whole variables come first, followed by the arrays of callbacks.
        whole, cut = iter(arrays), iter(shards["cut"])
        values = {name: [_value(next(cut), whole) for _ in variables] for name, variables in described["names"].items()}
        callbacks = {name: decode(state, arrays) for name, state in described["callbacks"].items()}
        files = [ShardFile(*file) for file in shards["files"]]
        rest = described.get("built"), described.get("kernels")
        return cls(values, described["names"], callbacks, described["steps"], files, shards["replicas"], *rest)

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


def shard_files_of(packed: bytes) -> list[ShardFile]:
    """The files of shards that a packed content names, without reading its arrays."""
    with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
        return [ShardFile(*file) for file in _read_description(archive).get("shards", {}).get("files", ())]


def state_in_words(callback: str) -> str:
    """The name of a callback's state in errors."""
    return f"The state of the callback {callback}"


def _read_description(archive: np.lib.npyio.NpzFile) -> dict[str, Any]:
    """The JSON part of a backup's content."""
    try:
        return read_json(archive[DESCRIPTION].tobytes())
    except ValueError as error:
        raise ValueError(
            f"The backup has no description written by this package: {error}. Use another directory."
        ) from None


def _value(cut: list[Any] | None, whole: Iterator[np.ndarray]) -> np.ndarray | VariableInShards:
    """A variable's value: in shards as `cut` describes them, or the next of the whole ones if it is `None`."""
    if cut is None:
        return next(whole)
    shape, dtype, size, begin = cut
    return VariableInShards(tuple(shape), np.dtype(dtype), size, begin)


def _view_dtype(array: np.ndarray, name: str | None) -> np.ndarray:
    # NumPy does not know bfloat16 and similar types, and returns raw bytes.
    return array.view(np.dtype(name)) if name else array


def _describe_variable(variable: tuple[str, Sequence[int], str] | None) -> str:
    return f"{variable[0]} of shape {variable[1]} and {variable[2]}" if variable else "nothing"
