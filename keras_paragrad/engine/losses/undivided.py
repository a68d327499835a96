"""Keras's division of losses by the number of replicas, left out while a step of ours computes its loss.

`keras.src.losses.loss.scale_loss_for_distribution` is a function of a module, which losses call by its global name, and
can't be replaced on an instance. It is replaced for the process while one of our steps is traced, and looks at the
thread that it runs on: on any other it divides as ever, so that another model that is trained meanwhile is Keras's.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras.src.losses.loss as keras_loss

_SCALE = "scale_loss_for_distribution"
_lock = threading.Lock()
_local = threading.local()
_inside = 0
_original: Any = None


@contextlib.contextmanager
def not_divided_by_replicas() -> Iterator[None]:
    """Context in which a loss on a replica, on this thread only, is what one device computes on the same rows.

    Keras divides what its losses return by the number of replicas, but not a sum, a loss that returns one number or
    what `compute_loss` computes by itself. A total of these can't be corrected afterwards. Keras's function is replaced
    while a step is traced within this context, and put back at its end; for other threads it does what it did.
    """
    _local.depth = getattr(_local, "depth", 0) + 1
    _replace()
    try:
        yield
    finally:
        _put_back()
        _local.depth -= 1


def _replace() -> None:
    global _inside, _original
    with _lock:
        _inside += 1
        if _inside == 1:
            _original = getattr(keras_loss, _SCALE)
            setattr(keras_loss, _SCALE, _scale_elsewhere)


def _put_back() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if not _inside:
            setattr(keras_loss, _SCALE, _original)


def _scale_elsewhere(value: Any) -> Any:
    return value if getattr(_local, "depth", 0) else _original(value)
