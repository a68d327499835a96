"""The user's callbacks in `fit`: only the chief's write files, and backups hold their state."""

import copy
import re
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import keras

from keras_paragrad.accumulation.exact_accumulation import ExactAccumulation, with_those_of_updates
from keras_paragrad.arguments import check_each, check_flag, check_instance
from keras_paragrad.distribution.checkpoint.content import STORABLE, UnstorableError, encode, state_in_words

# These read variables, which may be a collective operation; the attribute is the path they write to.
_READ_BY_ALL = {keras.callbacks.ModelCheckpoint: "filepath", keras.callbacks.TensorBoard: "log_dir"}
# These read only the logs.
_CHIEF_ONLY = (keras.callbacks.CSVLogger, keras.callbacks.RemoteMonitor)

# Keras 3.12 has no Orbax.
_OTHER_BACKUPS = tuple(
    getattr(keras.callbacks, name) for name in ("BackupAndRestore", "OrbaxCheckpoint") if hasattr(keras.callbacks, name)
)


def with_one_writer(callbacks: Sequence[keras.callbacks.Callback], is_chief: bool) -> list[keras.callbacks.Callback]:
    """The callbacks for `fit` on a worker, so that no two workers write the same file.

    The chief uses all of them. On other workers, `ModelCheckpoint` and `TensorBoard` take part in reading the model,
    and write to a temporary directory, which is removed; `CSVLogger` and `RemoteMonitor` are omitted. Other callbacks
    are unchanged: a custom one that writes must check which worker it is on.

    Args:
        callbacks: Keras callbacks.
        is_chief: Whether this worker writes; `DistributedFit.is_chief`.

    Returns:
        A new list. The callbacks in it that write elsewhere are copies.

    Raises:
        ValueError: An argument is invalid, or a `BackupAndRestore` or `OrbaxCheckpoint` is among the callbacks, which
            several workers can't share.

    Example:

    >>> import keras
    >>> from keras_paragrad.distribution import with_one_writer
    >>> log = keras.callbacks.CSVLogger("log.csv")
    >>> with_one_writer([log], is_chief=True) == [log], with_one_writer([log], is_chief=False)
    (True, [])
    """
    callbacks = check_callbacks(callbacks)
    is_chief = check_flag("is_chief", is_chief)
    for callback in with_those_of_updates(callbacks):
        if isinstance(callback, _OTHER_BACKUPS):
            raise ValueError(
                f"{type(callback).__name__} can't be used by several workers: they would write the same files, or "
                "resume at different steps. Write callbacks=dist.callbacks(directory) instead."
            )
    if is_chief:
        return callbacks
    return [replacement for callback in callbacks for replacement in _without_files(callback)]


def check_callbacks(callbacks: object) -> list[keras.callbacks.Callback]:
    """The argument `callbacks` as a list."""

    def check(name: str, value: object) -> keras.callbacks.Callback:
        return check_instance(name, value, keras.callbacks.Callback, "a Keras callback")

    return list(check_each("callbacks", callbacks, check, "Keras callbacks"))


def _without_files(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """What a worker that writes no files calls in place of a callback: it, nothing, or a copy that writes elsewhere."""
    if isinstance(callback, _CHIEF_ONLY):
        return []
    if isinstance(callback, ExactAccumulation):
        elsewhere = copy.copy(callback)
        elsewhere.callbacks = [replacement for inner in callback.callbacks for replacement in _without_files(inner)]
        return [elsewhere]
    attribute = next((name for kind, name in _READ_BY_ALL.items() if isinstance(callback, kind)), None)
    if attribute is None:
        return [callback]
    elsewhere, scratch = copy.copy(callback), tempfile.mkdtemp(prefix="keras_paragrad_")
    # Without the numbers of epochs and batches, each file takes the place of the one before.
    name = re.sub(r"\{.*?\}", "", Path(getattr(callback, attribute)).name)
    setattr(elsewhere, attribute, f"{scratch}/unused{name}")
    weakref.finalize(elsewhere, shutil.rmtree, scratch, ignore_errors=True)
    return [elsewhere]


# The attributes that hold the state of Keras's callbacks.
_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.History: ("history", "epoch"),
}
# The name of the state of `fit`'s own `History`, the first callback of its class.
HISTORY = "History 0"


@runtime_checkable
class HasState(Protocol):
    """A custom callback whose state is backed up.

    `None`, numbers, strings, bytes, NumPy arrays, and lists, tuples and dicts of these are restored exactly, with their
    types and their keys' types. Any other value is refused when training begins.
    """

    def get_state(self) -> dict[str, Any]:
        """The state to resume from."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; called after every callback's `on_train_begin`."""
        ...


def callback_states(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, dict[str, Any]]:
    """The state of each callback that has any, by its class and its index among the callbacks of the class."""
    return {
        name: callback.get_state()
        if isinstance(callback, HasState)
        else {key: getattr(callback, key) for key in _state_attributes(callback) if hasattr(callback, key)}
        for name, callback in _callbacks_by_name(callbacks).items()
    }


def check_callback_states(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Raises an `UnstorableError` if a state would not be restored exactly."""
    for name, state in callback_states(callbacks).items():
        try:
            encode(state, [], state_in_words(name))
        except UnstorableError as error:
            raise UnstorableError(
                f"{error} It would not be restored exactly. {STORABLE} Convert it in get_state, and back in set_state; "
                "or leave the callback out of Backup(callbacks=...), so that its state is not backed up."
            ) from None


def append_epoch(history: dict[str, Any], epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
    """A `History`'s state with the epoch that just ended; Keras calls `History` after all other callbacks."""
    if epoch in history["epoch"]:
        return history
    values = {name: [*history["history"].get(name, ()), value] for name, value in logs.items()}
    return {"history": {**history["history"], **values}, "epoch": [*history["epoch"], epoch]}


def restore_callback_states(callbacks: Iterable[keras.callbacks.Callback], states: dict[str, dict[str, Any]]) -> None:
    """Restores the state of callbacks; one without saved state is left unchanged."""
    for name, callback in _callbacks_by_name(callbacks).items():
        if name not in states:
            continue
        state = states[name]
        if isinstance(callback, HasState):
            callback.set_state(state)
            continue
        for attribute, value in state.items():
            setattr(callback, attribute, value)


def _callbacks_by_name(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    """The callbacks that have a state, by their class and their index among the callbacks of the class."""
    count: Counter[str] = Counter()
    named = {}
    for callback in callbacks:
        if isinstance(callback, HasState) or _state_attributes(callback):
            kind = type(callback).__name__
            named[f"{kind} {count[kind]}"] = callback
            count[kind] += 1
    return named


def _state_attributes(callback: keras.callbacks.Callback) -> tuple[str, ...]:
    return next((names for kind, names in _ATTRIBUTES.items() if isinstance(callback, kind)), ())
