"""Losses that layers add, kept apart by replica.

Replicas are traced in turns: one that waits for a collective lets the next one run. Keras keeps the losses of a call in
a list on the layer, which the next replica's call would clear and add its own to.
"""

import collections
import threading
from typing import Any

import keras

_LOSSES = "_losses"


class _OfReplicas(collections.UserList):
    """A list with other contents in each thread, which a replica has for itself.

    Args:
        replaced: Keras's own list.
    """

    def __init__(self, replaced: list[Any]):
        self.replaced = replaced
        self._threads = threading.local()

    @property
    def data(self) -> list[Any]:  # pyright: ignore
        """Those of this thread."""
        return vars(self._threads).setdefault("own", [])

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __reduce__(self) -> Any:
        # As Keras's own, where a model is copied or pickled.
        return list, ()


def keep_apart(model: keras.Model) -> None:
    """Has each replica find the losses that it added, until `keep_together`."""
    for layer in model._flatten_layers():
        # Bypass Keras's tracking: losses are not state.
        if not isinstance(vars(layer)[_LOSSES], _OfReplicas):
            vars(layer)[_LOSSES] = _OfReplicas(vars(layer)[_LOSSES])


def keep_together(model: keras.Model) -> None:
    """Restores Keras's own lists."""
    for layer in model._flatten_layers():
        if isinstance(own := vars(layer)[_LOSSES], _OfReplicas):
            vars(layer)[_LOSSES] = own.replaced
