"""The content of a backup: values of variables and state of callbacks, serialized to bytes."""

import io
import itertools
import json
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.distribution.checkpoint.values import decode, dtype_name, encode
from keras_paragrad.plain_json import read_json

DESCRIPTION = "description"


class Content(NamedTuple):
    """The state to resume from.

    Attributes:
        values: The variables' values, by owner.
        names: The variables' names, in the same order.
        callbacks: The state of each callback that has any.
        steps: How many batches an epoch has, or `None` if that was unknown.
    """

    values: dict[str, list[np.ndarray]]
    names: dict[str, list[str]]
    callbacks: dict[str, Any]
    steps: int | None = None

    def to_bytes(self) -> bytes:
        """The content as a NumPy archive, which holds no code.

        Raises:
            UnstorableError: A callback's state holds a value that a backup can't.
        """
        arrays = [array for values in self.values.values() for array in values]
        callbacks = {name: encode(state, arrays, state_named(name)) for name, state in self.callbacks.items()}
        described = {
            "names": self.names,
            "callbacks": callbacks,
            "steps": self.steps,
            "dtypes": [dtype_name(array.dtype) for array in arrays],
        }
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
            try:
                described = read_json(archive[DESCRIPTION].tobytes())
            except ValueError as error:
                raise ValueError(
                    f"The backup has no description written by this package: {error}. Use another directory."
                ) from None
            arrays = [_of_dtype(archive[str(index)], name) for index, name in enumerate(described["dtypes"])]
        remaining = iter(arrays)
        values = {name: [next(remaining) for _ in variables] for name, variables in described["names"].items()}
        callbacks = {name: decode(state, arrays) for name, state in described["callbacks"].items()}
        return cls(values, described["names"], callbacks, described["steps"])

    def check_fits(self, section: str, variables: list[keras.Variable], source: Any) -> None:
        """Raises a `ValueError` that names the first variable without a matching value."""
        wanted = [(variable.path, tuple(variable.shape), variable.dtype) for variable in variables]
        values = zip(self.names[section], self.values[section], strict=True)
        found = [(name, value.shape, value.dtype.name) for name, value in values]
        for here, there in itertools.zip_longest(wanted, found):
            if here is None or there is None or here[1:] != there[1:]:
                raise ValueError(
                    f"{source} has backups of another model: where the {section} of this one has {_described(here)}, "
                    f"they have {_described(there)}. Train the model that they were made from, or use another "
                    "directory to start from scratch."
                )


def state_named(callback: str) -> str:
    """The name of a callback's state in errors."""
    return f"The state of the callback {callback}"


def _of_dtype(array: np.ndarray, name: str | None) -> np.ndarray:
    # NumPy does not know bfloat16 and similar types, and returns raw bytes.
    return array.view(np.dtype(name)) if name else array


def _described(variable: tuple[str, Any, str] | None) -> str:
    return f"{variable[0]} of shape {variable[1]} and {variable[2]}" if variable else "nothing"
