"""Encodes Python values as JSON and arrays, and decodes them exactly."""

from typing import Any

import numpy as np

_DEEPEST = 64
_AS_THEY_ARE = (type(None), bool, int, float, str)
# Python refuses to parse longer integers in decimal.
_LONGEST_INT = 1 << 63
CAN_HOLD = (
    "A backup can hold None, bool, int, float, str and bytes, NumPy arrays and scalars that contain no Python objects, "
    "and lists, tuples and dicts of these."
)


class UnstorableError(TypeError):
    """A value can't be backed up because it would not be restored exactly."""


def encode(value: Any, arrays: list[np.ndarray], where: str) -> Any:
    """Encodes a value as JSON; types that JSON lacks become an object with one key, the type.

    Args:
        value: `None`, a bool, a number, a string, bytes, a NumPy array or scalar; or lists, tuples and dicts of these,
            whose keys may be any hashable.
        arrays: Arrays and bytes are appended to it.
        where: Description of the value, for errors.

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
    if depth > _DEEPEST:
        raise UnstorableError(f"{where} is nested deeper than {_DEEPEST} levels, or contains itself.")
    kind = type(value)
    if kind is int and abs(value) >= _LONGEST_INT:
        return {"int": hex(value)}
    if kind in _AS_THEY_ARE:
        return value
    if kind in (list, tuple):
        items = [_encode(item, arrays, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        return {"dict": [_pair(key, item, arrays, where, depth + 1) for key, item in value.items()]}
    if kind is bytes:
        return {"bytes": _kept(np.frombuffer(value, np.uint8), arrays)}
    if (kind is np.ndarray or isinstance(value, np.generic)) and can_hold(np.asarray(value).dtype):
        return {"array" if kind is np.ndarray else "scalar": _kept(np.asarray(value), arrays)}
    said = " ".join(repr(value).split())
    raise UnstorableError(f"{where} is {said if len(said) < 80 else said[:80] + '...'}, of type {kind.__name__}.")


def _pair(key: Any, value: Any, arrays: list[np.ndarray], where: str, depth: int) -> list[Any]:
    return [
        _encode(key, arrays, f"the key {key!r:.40} of {where}", depth),
        _encode(value, arrays, f"{where}[{key!r:.40}]", depth),
    ]


def _kept(array: np.ndarray, arrays: list[np.ndarray]) -> int:
    arrays.append(array)
    return len(arrays) - 1


def decode(encoded: Any, arrays: list[np.ndarray]) -> Any:
    """Decodes the result of `encode`.

    Args:
        encoded: What it returned.
        arrays: The arrays that it appended to.
    """
    if isinstance(encoded, list):
        return [decode(item, arrays) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, held),) = encoded.items()
    if kind == "int":
        return int(held, 16)
    if kind == "tuple":
        return tuple(decode(item, arrays) for item in held)
    if kind == "dict":
        return {decode(key, arrays): decode(value, arrays) for key, value in held}
    array = arrays[held]
    return array.tobytes() if kind == "bytes" else array if kind == "array" else array[()]


def can_hold(dtype: np.dtype) -> bool:
    """Whether a NumPy archive, with the dtype's name stored beside it, preserves a dtype."""
    if dtype.hasobject:
        return False
    return dtype_name(dtype) is not None or np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype


def dtype_name(dtype: np.dtype) -> str | None:
    """The name of a dtype that NumPy archives write as raw bytes, such as bfloat16; else `None`."""
    return dtype.name if dtype.names is None and np.dtype(dtype.str) != dtype else None
