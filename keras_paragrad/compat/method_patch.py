"""Methods of one object in place of those of its class: until they are restored, or while a step is traced."""

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from keras_paragrad.compat.state import state_of

Made = TypeVar("Made", bound="MethodPatch")


def replace_methods(owner: Any, **methods: Callable[..., Any]) -> None:
    """Gives an object methods in place of those of its class, bypassing Keras's tracking of attributes."""
    vars(owner).update(methods)


def restore_methods(owner: Any, *names: str) -> None:
    """Restores the methods of an object's class."""
    for name in names:
        vars(owner).pop(name, None)


class MethodPatch(abc.ABC):
    """Methods of objects, patched from when the first replica enters until the last one leaves."""

    def __init__(self):
        self.inside = 0
        self._replaced = contextlib.ExitStack()

    @abc.abstractmethod
    def patch_all(self) -> None:
        """Replaces what is to be replaced."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replaces a method or an attribute of one object until the last replica has left."""
        before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
        owner.__dict__[name] = value

        def put_back():
            del owner.__dict__[name]
            owner.__dict__.update(before)

        self._replaced.callback(put_back)

    def put_back(self) -> None:
        """Restores everything."""
        self._replaced.close()


def is_patched(owner: Any, name: str) -> bool:
    """Whether a method of an object is replaced now."""
    return name in owner.__dict__


def patch_of(owner: Any, kind: type[Made]) -> Made | None:
    """What replaces an object's methods now, of one class."""
    return state_of(owner).patches.get(kind)


@contextlib.contextmanager
def patched(owner: Any, make: Callable[[], Made]) -> Iterator[Made]:
    """Replaces methods while a step is traced in it; entered on every replica.

    Args:
        owner: The object that keeps the replacement, so that the other replicas find it.
        make: Makes the replacement. An owner keeps one of each class.
    """
    # Replicas are traced interleaved, up to each collective: the first to enter patches, the last to leave restores.
    made, state = make(), state_of(owner)
    kind = type(made)
    replacement = state.patches.get(kind, made)
    state.patches = {**state.patches, kind: replacement}
    replacement.inside += 1
    try:
        if replacement.inside == 1:
            replacement.patch_all()
        yield replacement
    finally:
        replacement.inside -= 1
        if not replacement.inside:
            replacement.put_back()
            state.patches = {other: each for other, each in state.patches.items() if other is not kind}
