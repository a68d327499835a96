"""`Slot`, a value that the package attaches to users' objects, and `MethodPatch`, which replaces their methods."""

import abc
import contextlib
import inspect
import logging
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from types import FrameType
from typing import Any, Generic, TypeVar

_KEY = "_keras_paragrad"
# The slots whose values `untouched`, which undoes the side effects of calling a model, leaves as they are.
KEPT: list["Slot[Any]"] = []
Value = TypeVar("Value")


def attached(owner: object) -> Mapping[str, Any]:
    """The values of all slots that are attached to an object, by name."""
    return getattr(owner, "__dict__", {}).get(_KEY, {})


class Slot(Generic[Value]):
    """A value that the package attaches to users' objects: models, layers, optimizers, losses, strategies, functions.

    The module that uses a slot declares it. The values of an object are in one attribute, which is deleted when all
    are empty. Keras doesn't track, save or clone it, and `untouched` restores it with the object's other attributes.

    Args:
        name: The name among the values of an object.
        empty: The value when nothing is attached. Values are replaced, never mutated.
        kept: Whether `untouched` leaves the value as it is.
    """

    def __init__(self, name: str, empty: Value, *, kept: bool = False):
        self.name, self.empty = name, empty
        if kept:
            KEPT.append(self)

    def of(self, owner: object) -> Value:
        """The value attached to an object."""
        return attached(owner).get(self.name, self.empty)

    def attach(self, owner: object, value: Value) -> None:
        """Attaches a value; the empty one deletes it."""
        slots = {name: other for name, other in attached(owner).items() if name != self.name}
        # A falsy value of another type isn't the empty one.
        if value or type(value) is not type(self.empty):
            slots[self.name] = value
        # Bypass `__setattr__`: Keras tracks and saves what is assigned as an attribute.
        if slots:
            vars(owner)[_KEY] = slots
        else:
            vars(owner).pop(_KEY, None)


# Messages that were logged or shown as warnings.
LOGGED = Slot[frozenset[str]]("logged", frozenset(), kept=True)
# Methods replaced while a step is traced, by the class of their `MethodPatch`.
_PATCHES = Slot[Mapping[type, Any]]("patches", {})


def record_first(owner: object, message: str) -> bool:
    """Records that a message was given for an owner; returns whether it is the first time."""
    logged = LOGGED.of(owner)
    if message in logged:
        return False
    LOGGED.attach(owner, logged | {message})
    return True


def log_once(owner: object, message: str, level: int = logging.INFO) -> None:
    """Logs a message once per owner."""
    if record_first(owner, message):
        logging.getLogger("keras_paragrad").log(level, "%s", message)


# Modules and folders whose code isn't the user's.
_LIBRARIES = {"keras", "keras_paragrad", "tensorflow", *sys.stdlib_module_names}
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def warn(message: str) -> None:
    """Shows a warning at the line of the user's code that is running."""
    # Replicas are traced in threads of their own, while the main one waits.
    interpreter: Any = sys
    main = interpreter._current_frames().get(threading.main_thread().ident)
    frame = _users(inspect.currentframe()) or _users(main)
    if frame is None:
        warnings.warn(message, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry)


def _users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        is_users = module not in _LIBRARIES and not module.startswith("__autograph")
        if is_users and not frame.f_code.co_filename.startswith(_INSTALLED):
            return frame
        frame = frame.f_back
    return None


def warn_once(owner: object, message: str) -> None:
    """Warns once per owner, rather than in each `fit`, replica or trace."""
    if record_first(owner, message):
        warn(message)


Patch = TypeVar("Patch", bound="MethodPatch")


def replace_methods(owner: object, **methods: Callable[..., object]) -> None:
    """Overrides methods on an instance, bypassing Keras's tracking of attributes."""
    vars(owner).update(methods)


def restore_methods(owner: object, *names: str) -> None:
    """Restores the methods of an object's class."""
    for name in names:
        vars(owner).pop(name, None)


class MethodPatch(abc.ABC):
    """Methods replaced from when the first replica enters `patched` until the last one leaves."""

    def __init__(self):
        self.entered = 0
        self._exits = contextlib.ExitStack()

    @abc.abstractmethod
    def patch_all(self) -> None:
        """Calls `replace` for each method."""

    def replace(self, owner: object, name: str, value: object) -> None:
        """Replaces a method or attribute of an instance until the last replica leaves."""
        before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
        owner.__dict__[name] = value

        def restore():
            del owner.__dict__[name]
            owner.__dict__.update(before)

        self._exits.callback(restore)

    def restore(self) -> None:
        """Restores everything."""
        self._exits.close()


def patch_of(owner: object, kind: type[Patch]) -> Patch | None:
    """An object's active patch of a class."""
    return _PATCHES.of(owner).get(kind)


@contextlib.contextmanager
def patched(owner: object, make: Callable[[], Patch]) -> Generator[Patch]:
    """Replaces methods while a step is traced in this context; entered on every replica.

    The patch, at most one of each class, is attached to `owner`, so that the other replicas share it.
    """
    # Traces of replicas are interleaved at collectives: the first replica to enter patches, the last to leave restores.
    new = make()
    kind = type(new)
    patch = _PATCHES.of(owner).get(kind, new)
    _PATCHES.attach(owner, {**_PATCHES.of(owner), kind: patch})
    patch.entered += 1
    try:
        if patch.entered == 1:
            patch.patch_all()
        yield patch
    finally:
        patch.entered -= 1
        if not patch.entered:
            patch.restore()
            _PATCHES.attach(owner, {other: patch for other, patch in _PATCHES.of(owner).items() if other is not kind})
