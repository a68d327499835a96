"""`ModelState`: per-object state that the package attaches to user objects; and `MethodPatch`: replaced methods."""

import abc
import contextlib
import logging
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, TypeVar

_KEY = "_keras_paragrad"
Value = TypeVar("Value")


class Slot(Generic[Value]):
    """One value in a `ModelState`. Assigning the empty value deletes it.

    Args:
        empty: The value when nothing is assigned. Values are replaced, never mutated.
    """

    def __init__(self, empty: Value):
        self.empty = empty

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, state: "ModelState", kind: type) -> Value:
        return state.attached.get(self.name, self.empty)

    def __set__(self, state: "ModelState", value: Value) -> None:
        others = {name: other for name, other in state.attached.items() if name != self.name}
        state.attach(others if type(value) is type(self.empty) and not value else {**others, self.name: value})


class ModelState:
    """Everything attached to one object, in one attribute, which is deleted when every slot is empty.

    Keras doesn't track, save or clone it, and `untouched` restores it with the object's other attributes.

    Args:
        owner: The object: a model, layer, optimizer, loss, strategy or function.
    """

    # Of models: the step builder, and the preparations by a `Parallelism`.
    step_builder = Slot[Any](None)
    preparations = Slot[Mapping[type, Any]]({})
    # Of models on a mesh: the strategy of the workers that train it.
    workers = Slot[Any](None)
    # Of models: the arguments of each `recompute` in effect, for processes in which a batch is tried.
    recomputations = Slot[tuple[dict[str, Any], ...]](())
    # Results of probes, with the `compile` that they are valid for, and messages logged already.
    independence = Slot[tuple[Any, dict[Any, Any]] | None](None)
    deferred_refusal = Slot[Mapping[str, Any]]({})
    logged = Slot[frozenset[str]](frozenset())
    # Of models: the results of a custom `compute_metrics` for the part of a batch that was traced last.
    shown_metrics = Slot[tuple[str, ...] | None](None)
    # By replica, the weight of the loss in the backward pass that is being traced.
    replica_weights = Slot[Mapping[int, Any]]({})
    # Of any object: methods replaced while a step is traced, by the class of their `MethodPatch`.
    patches = Slot[Mapping[type, Any]]({})
    # Of layers: whether a call gathers the weights.
    gathers = Slot[bool](False)
    # Of optimizers: the original of an intercepted `apply`, the installed transform, and the norms of sharded gradients
    # (`()` between updates).
    interception = Slot[Any](None)
    transform = Slot[Any](None)
    norms = Slot[tuple[Any, ...] | None](None)
    # Of progress bars: the names of the values that they show.
    progress = Slot[Any](None)
    # Of strategies: the `WaitClock`, which measures how long a worker waits for the others.
    wait_clock = Slot[Any](None)
    # Of strategies and replaced methods: whether they warn of an unprepared `fit`.
    warns = Slot[bool](False)

    def __init__(self, owner: object):
        self._owner = owner

    @property
    def attached(self) -> Mapping[str, Any]:
        """The assigned slots, by name."""
        return getattr(self._owner, "__dict__", {}).get(_KEY, {})

    def attach(self, slots: dict[str, Any]) -> None:
        """Replaces all slots."""
        # Bypass `__setattr__`: Keras tracks and saves what is assigned as an attribute.
        if slots:
            vars(self._owner)[_KEY] = slots
        else:
            vars(self._owner).pop(_KEY, None)


def state_of(owner: object) -> ModelState:
    """The state attached to an object."""
    return ModelState(owner)


def is_first(owner: object, message: str) -> bool:
    """Whether this is the first time that a message is said for this owner."""
    state = state_of(owner)
    if message in state.logged:
        return False
    state.logged |= {message}
    return True


def log_once(owner: object, message: str, level: int = logging.INFO) -> None:
    """Logs a message once per owner."""
    if is_first(owner, message):
        logging.getLogger("keras_paragrad").log(level, "%s", message)


def warn_once(owner: object, message: str, *, stacklevel: int = 2) -> None:
    """Warns once per owner, rather than in each `fit`, replica or trace."""
    if is_first(owner, message):
        warnings.warn(message, stacklevel=stacklevel + 1)


Patch = TypeVar("Patch", bound="MethodPatch")


def replace_methods(owner: object, **methods: Callable[..., object]) -> None:
    """Overrides methods on an instance, bypassing Keras's tracking of attributes."""
    vars(owner).update(methods)


def restore_methods(owner: object, *names: str) -> None:
    """Restores the methods of an object's class."""
    for name in names:
        vars(owner).pop(name, None)


class MethodPatch(abc.ABC):
    """Methods replaced from when the first replica enters until the last one leaves."""

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


def is_patched(owner: object, name: str) -> bool:
    """Whether a method is overridden on the instance."""
    return name in owner.__dict__


def patch_of(owner: object, kind: type[Patch]) -> Patch | None:
    """An object's active patch of a class."""
    return state_of(owner).patches.get(kind)


@contextlib.contextmanager
def patched(owner: object, make: Callable[[], Patch]) -> Generator[Patch]:
    """Replaces methods while a step is traced in it; entered on every replica.

    Args:
        owner: The object that the patch is attached to, so that the other replicas share it.
        make: Makes the patch. An owner has at most one of each class.
    """
    # Traces of replicas are interleaved at collectives: the first replica to enter patches, the last to leave restores.
    new, state = make(), state_of(owner)
    kind = type(new)
    patch = state.patches.get(kind, new)
    state.patches = {**state.patches, kind: patch}
    patch.entered += 1
    try:
        if patch.entered == 1:
            patch.patch_all()
        yield patch
    finally:
        patch.entered -= 1
        if not patch.entered:
            patch.restore()
            state.patches = {other: patch for other, patch in state.patches.items() if other is not kind}
