"""The state of other callbacks, so a resumed run stops early or lowers its rate where an uninterrupted one does."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import keras

from keras_paragrad.distribution.checkpoint.content import CAN_HOLD, UnstorableError, encode, state_named

_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.History: ("history", "epoch"),
}
HISTORY = "History 0"


@runtime_checkable
class HasState(Protocol):
    """A custom callback whose state is backed up.

    Restored exactly are `None`, numbers, strings, bytes, NumPy arrays, and lists, tuples and dicts of these, with
    their types and the types of their keys. A state that holds anything else is refused when training begins.
    """

    def get_state(self) -> dict[str, Any]:
        """The state to resume from."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; called after every callback's `on_train_begin`."""
        ...


def state_of(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, dict[str, Any]]:
    """The state of each callback that has any, by class and index among the callbacks of that class."""
    return {name: _get(callback) for name, callback in _named(callbacks).items()}


def check_storable(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Raises an `UnstorableError`, a `TypeError`, if a state would not be restored exactly."""
    for name, state in state_of(callbacks).items():
        try:
            encode(state, [], state_named(name))
        except UnstorableError as error:
            raise UnstorableError(
                f"{error} It would not be restored exactly. {CAN_HOLD} Convert it in get_state, and back in set_state; "
                "or leave the callback out of Backup(callbacks=...), so that its state is not backed up."
            ) from None


def with_epoch(history: dict[str, Any], epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
    """A `History`'s state with the epoch that just ended; Keras calls `History` after all other callbacks."""
    if epoch in history["epoch"]:
        return history
    values = {name: [*history["history"].get(name, ()), value] for name, value in logs.items()}
    return {"history": {**history["history"], **values}, "epoch": [*history["epoch"], epoch]}


def restore_state(callbacks: Iterable[keras.callbacks.Callback], states: dict[str, dict[str, Any]]) -> None:
    """Restores the state of callbacks; one without saved state is left unchanged."""
    for name, callback in _named(callbacks).items():
        if name not in states:
            continue
        state = states[name]
        if isinstance(callback, HasState):
            callback.set_state(state)
            continue
        for attribute, value in state.items():
            setattr(callback, attribute, value)


def _named(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    count: Counter[str] = Counter()
    named = {}
    for callback in callbacks:
        if isinstance(callback, HasState) or _attributes(callback):
            kind = type(callback).__name__
            named[f"{kind} {count[kind]}"] = callback
            count[kind] += 1
    return named


def _get(callback: keras.callbacks.Callback) -> dict[str, Any]:
    if isinstance(callback, HasState):
        return callback.get_state()
    return {name: getattr(callback, name) for name in _attributes(callback) if hasattr(callback, name)}


def _attributes(callback: keras.callbacks.Callback) -> tuple[str, ...]:
    return next((names for kind, names in _ATTRIBUTES.items() if isinstance(callback, kind)), ())
