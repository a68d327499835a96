"""Python values as JSON and arrays, and back as exactly what they were."""

from typing import Any

import numpy as np

_DEEPEST = 64
_AS_THEY_ARE = (type(None), bool, int, float, str)
# Longer ones, as decimals, Python refuses to read.
_LONGEST_INT = 1 << 63
CAN_HOLD = (
    "A backup can hold None, bool, int, float, str and bytes, NumPy arrays and numbers without Python objects in them, "
    "and lists, tuples and dicts of these."
)


class UnstorableError(TypeError):
    """A value can't be backed up, as it would come back as something else."""


def encode(value: Any, arrays: list[np.ndarray], where: str) -> Any:
    """A value as JSON; what JSON does not have is an object of one key, its type.

    Args:
        value: `None`, a bool, a number, a string, bytes, a NumPy array or scalar; or lists, tuples and dicts of these,
            whose keys may be anything that can be hashed.
        arrays: Arrays and bytes are appended to it.
        where: What the value is, for the error.

    Returns:
        What `json.dumps` takes.

    Raises:
        UnstorableError: A value, or one in it, is of another type, or nested too deep.

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
    """The value that `encode` was given.

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
    """Whether a NumPy archive, and the name that it gets beside it, bring a dtype back."""
    if dtype.hasobject:
        return False
    return dtype_name(dtype) is not None or np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype


def dtype_name(dtype: np.dtype) -> str | None:
    """The name of a dtype that NumPy archives don't know, as bfloat16, and write as bytes; else `None`."""
    return dtype.name if dtype.names is None and np.dtype(dtype.str) != dtype else None
