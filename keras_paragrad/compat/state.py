"""`ModelState`, what the pack attaches to objects of the user's, and `MethodPatch`, which replaces their methods."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

_KEY = "_keras_paragrad"
Value = TypeVar("Value")


class Slot(Generic[Value]):
    """One concern's value in a `ModelState`. Assigning what is empty deletes it.

    Args:
        empty: What it is where nothing was assigned. Values are replaced and never changed in place.
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
    """What is attached to one object, all in one attribute of it, which is gone when every slot is empty.

    Keras neither tracks nor saves nor clones it, and `untouched` puts it back with the object's other attributes.

    Args:
        owner: The object: a model, layer, optimizer or loss, but also a strategy or function.
    """

    # Of models: who builds the step, and how the model is trained (`distribution.preparation`).
    step_builder = Slot[Any](None)
    preparations = Slot[Mapping[type, Any]]({})
    # The strategy by which workers that hold parts of the model talk to each other.
    workers = Slot[Any](None)
    # What probes have found out for the `compile` they are stored with, and what was logged already.
    independence = Slot[tuple[Any, dict[Any, Any]] | None](None)
    deferred_refusal = Slot[Mapping[str, Any]]({})
    logged = Slot[frozenset[str]](frozenset())
    # By replica, what the loss is multiplied with in the backward pass that is being traced.
    replica_weights = Slot[Mapping[int, Any]]({})
    # Of any: the methods that are replaced while a step is traced, by the class of their `MethodPatch`.
    patches = Slot[Mapping[type, Any]]({})
    # Of layers: whether a call gathers the weights.
    gathers = Slot[bool](False)
    # Of optimizers: what was in its `__dict__` in place of the `apply` that is intercepted, the installed *transform*,
    # and the norms of gradients in shards, `()` between updates.
    intercepted = Slot[Mapping[str, Any] | None](None)
    transform = Slot[Any](None)
    norms = Slot[tuple[Any, ...] | None](None)
    # Of compiled losses: who records their terms.
    listeners = Slot[list[Any] | None](None)
    # Of strategies, and of functions in a method's place: whether they warn of an unprepared `fit`.
    warns = Slot[bool](False)

    def __init__(self, owner: Any):
        self._owner = owner

    @property
    def attached(self) -> Mapping[str, Any]:
        """The slots that are filled, by name."""
        return getattr(self._owner, "__dict__", {}).get(_KEY, {})

    def attach(self, slots: dict[str, Any]) -> None:
        """Replaces all slots."""
        # Bypass `__setattr__`: Keras tracks and saves what is assigned as an attribute.
        if slots:
            vars(self._owner)[_KEY] = slots
        else:
            vars(self._owner).pop(_KEY, None)


def state_of(owner: Any) -> ModelState:
    """What is attached to an object."""
    return ModelState(owner)


Patch = TypeVar("Made", bound="MethodPatch")


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
        self.entered = 0
        self._exits = contextlib.ExitStack()

    @abc.abstractmethod
    def patch_all(self) -> None:
        """Replaces what is to be replaced."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replaces a method or an attribute of one object until the last replica has left."""
        before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
        owner.__dict__[name] = value

        def restore():
            del owner.__dict__[name]
            owner.__dict__.update(before)

        self._exits.callback(restore)

    def restore(self) -> None:
        """Restores everything."""
        self._exits.close()


def is_patched(owner: Any, name: str) -> bool:
    """Whether a method of an object is replaced now."""
    return name in owner.__dict__


def patch_of(owner: Any, kind: type[Patch]) -> Patch | None:
    """What replaces an object's methods now, of one class."""
    return state_of(owner).patches.get(kind)


@contextlib.contextmanager
def patched(owner: Any, make: Callable[[], Patch]) -> Iterator[Patch]:
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
    replacement.entered += 1
    try:
        if replacement.entered == 1:
            replacement.patch_all()
        yield replacement
    finally:
        replacement.entered -= 1
        if not replacement.entered:
            replacement.restore()
            state.patches = {other: each for other, each in state.patches.items() if other is not kind}
