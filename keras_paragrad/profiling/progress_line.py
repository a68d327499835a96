"""Keeps Keras's progress bar within a line: hides values that callbacks add to `logs`, only in the bar."""

import inspect
import shutil
from collections.abc import Collection, Sequence
from typing import Any

import keras

from keras_paragrad.compat.model import fit_frame
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import Logs

# The characters of a line that the bar, the counter and the times take, and that a value and its name take.
_BAR, _VALUE = 48, 15
# Attached to a progress bar: the filter that decides which values it shows.
_FILTER = Slot["_Filter | None"]("shown", None)


def hide_in_progress_bar(model: keras.Model, names: Collection[str], few: Sequence[str]) -> None:
    """Makes the progress bar of the running `fit` show only a few of a callback's values in `logs`, if they fit.

    Other callbacks, and so `History`, get all of them.
    """
    fit = fit_frame(inspect.currentframe(), model)
    callbacks = getattr(fit and fit.f_locals.get("callbacks"), "callbacks", ())
    bar = next((callback for callback in callbacks if isinstance(callback, keras.callbacks.ProgbarLogger)), None)
    if bar is not None and fit is not None:
        value_filter = _FILTER.of(bar) or _Filter(bar, fit.f_locals.get("validation_data") is not None)
        _FILTER.attach(bar, value_filter)
        value_filter.names |= {*names}
        value_filter.few += few


class _Filter:
    """Hides values from a progress bar, whose hooks it wraps, for all callbacks of this package together."""

    def __init__(self, bar: keras.callbacks.ProgbarLogger, validates: bool):
        self.validates = validates
        self.names: set[str] = set()
        self.few: list[str] = []
        hooks: Any = bar
        on_batch, on_epoch = bar.on_train_batch_end, bar.on_epoch_end
        hooks.on_train_batch_end = lambda batch, logs=None: on_batch(batch, self._filtered(logs))
        hooks.on_epoch_end = lambda epoch, logs=None: on_epoch(epoch, self._filtered(logs))

    def _filtered(self, logs: Logs | None) -> Logs:
        """The logs without the callbacks' values that the bar doesn't show."""
        logs = logs or {}
        shown = {name for name in logs if name not in self.names}
        room = shutil.get_terminal_size().columns - _BAR
        for name in shown:
            # Validation adds another value beside each of Keras's.
            twice = self.validates and name not in self.names
            room -= 0 if name.startswith("val_") else (1 + twice) * (len(name) + _VALUE) + twice * len("val_")
        # By their names alone: the bar goes on to show what it has shown once.
        for name in self.few:
            if len(name) + _VALUE <= room:
                shown.add(name)
                room -= len(name) + _VALUE
        return {name: value for name, value in logs.items() if name in shown}
