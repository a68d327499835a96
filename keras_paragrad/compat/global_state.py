"""Keras's global state of this thread: the open scopes, the context of a call, and the seed."""

from typing import Any

from keras_paragrad.compat.private import global_state


def state_of_thread() -> dict[str, Any]:
    """All values by name. `keras.utils.clear_session` begins a new dictionary."""
    return vars(global_state.GLOBAL_STATE_TRACKER)


def get_global_attribute(name: str) -> Any:
    """A value of the state, or `None`."""
    return state_of_thread().get(name)


def set_global_attribute(name: str, value: object) -> None:
    """Sets a value of the state."""
    state_of_thread()[name] = value
