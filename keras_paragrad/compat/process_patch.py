"""`ProcessPatch`, which replaces functions of Keras and TensorFlow while a context is open."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")
Opened = TypeVar("Opened")


class Replacement(NamedTuple):
    """A function of a module, or method of a class, and its replacement.

    The replacement is called with the value of the open context, the original, and the call's arguments.
    """

    owner: Any
    name: str
    function: Callable[..., Any]


class ProcessPatch(Generic[Value]):
    """Functions replaced from when the first context opens, on any thread, until the last one closes.

    The replacement is seen by the whole process, and calls the original on threads without an open context. Each
    replica is traced in a separate thread, so contexts of several threads close in any order.

    Args:
        find: Returns the replacements. Called when the first context opens.
    """

    def __init__(self, find: Callable[[], Iterable[Replacement]]):
        self._find = find
        self._lock, self._thread = threading.Lock(), threading.local()
        self._contexts = 0
        self._restorers: list[Callable[[], None]] = []

    @property
    def value(self) -> Value | None:
        """The value of this thread's innermost open context."""
        return getattr(self._thread, "value", None)

    @contextlib.contextmanager
    def open(self, value: Opened) -> Generator[Opened]:
        """Context in which the functions are replaced on this thread; `None` calls the originals again."""
        before = self.value
        self._count(1)
        self._thread.value = value
        try:
            yield value
        finally:
            self._thread.value = before
            self._count(-1)

    def _count(self, change: int) -> None:
        """Counts open contexts: replaces the functions before the first one, restores them after the last one."""
        with self._lock:
            if not self._contexts:
                # Look all of them up before setting any: a class may inherit from another.
                replaced = [(target.owner, target.name, self._replaced(target)) for target in self._find()]
                # What an owner only inherits is deleted.
                self._restorers = [
                    functools.partial(setattr, owner, name, vars(owner)[name])
                    if name in vars(owner)
                    else functools.partial(delattr, owner, name)
                    for owner, name, _ in replaced
                ]
                for replacement in replaced:
                    setattr(*replacement)
            self._contexts += change
            if not self._contexts:
                for restore in self._restorers:
                    restore()

    def _replaced(self, replacement: Replacement) -> Callable[..., Any]:
        """The function to install: calls the replacement on threads with a value, and the original on others."""
        original = getattr(replacement.owner, replacement.name)

        @functools.wraps(original)
        def replaced(*arguments: Any, **keywords: Any) -> Any:
            value = self.value
            if value is None:
                return original(*arguments, **keywords)
            return replacement.function(value, original, *arguments, **keywords)

        return replaced
