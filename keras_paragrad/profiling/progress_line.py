"""Keeps Keras's progress bar within a line: hides values that callbacks add to `logs`, only in the bar."""

import inspect
import shutil
from collections.abc import Collection, Sequence
from typing import Any

import keras

from keras_paragrad.arguments import check_each, check_text, refusal
from keras_paragrad.compat.model import fit_frame
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import Logs

# Characters of a line taken by the bar itself, and by the longest usual times, such as " 1:23 123ms/step".
_BAR, _TIMES = 20, 16
# Characters between values, and around a value's number.
_AROUND = len(" - :  ")
# Attached to a progress bar: the filter that decides which values it shows.
_FILTER = Slot["_Filter | None"]("shown", None)


def check_show(value: object, names: Collection[str], example: str) -> str | tuple[str, ...]:
    """Checks the argument `show`: `"auto"`, or some of the names that a callback reports."""
    if isinstance(value, str) and value == "auto":
        return value
    expected = f"'auto', or names among {', '.join(names)}"
    if isinstance(value, str):
        raise refusal("show", value, expected, f'["{example}"]')

    def check(name: str, value: object) -> str:
        if (text := check_text(name, value)) not in names:
            raise refusal(name, value, f"one of {', '.join(names)}", None)
        return text

    return check_each("show", value, check, expected, example=f'["{example}"]')


def hide_in_progress_bar(
    model: keras.Model, names: Collection[str], few: Sequence[str], show: str | tuple[str, ...]
) -> None:
    """Makes the progress bar of the running `fit` show only some of the values that a callback adds to `logs`.

    Other callbacks, and so `History`, get all of them.

    Args:
        model: The model.
        names: The names of all values of the callback.
        few: The names from which `"auto"` shows as many as fit into the line, in this order.
        show: `"auto"`, or the names to show.
    """
    fit = fit_frame(inspect.currentframe(), model)
    callbacks = getattr(fit and fit.f_locals.get("callbacks"), "callbacks", ())
    bar = next((callback for callback in callbacks if isinstance(callback, keras.callbacks.ProgbarLogger)), None)
    if bar is not None and fit is not None:
        value_filter = _FILTER.of(bar) or _Filter(bar, fit.f_locals.get("validation_data") is not None)
        _FILTER.attach(bar, value_filter)
        value_filter.add(names, few, show)


class _Filter:
    """Hides values from the progress bar of a `fit`, for all callbacks of this package together.

    Args:
        bar: The progress bar, whose hooks are wrapped.
        validates: Whether `fit` validates, which adds a `val_` value beside each of Keras's.
    """

    def __init__(self, bar: keras.callbacks.ProgbarLogger, validates: bool):
        self._validates = validates
        self._names: set[str] = set()
        self._few: list[str] = []
        self._chosen: list[str] = []
        # The `few` names that fit into this epoch's line, and the ones that didn't.
        self._shown: list[str] = []
        self._hidden: set[str] = set()
        self._steps: int | None = bar.target
        methods: Any = bar
        on_batch, on_epoch, on_begin = bar.on_train_batch_end, bar.on_epoch_end, bar.on_epoch_begin

        def on_epoch_begin(epoch: int, logs: Logs | None = None) -> None:
            self._shown, self._hidden = [*self._chosen], set()
            on_begin(epoch, logs)

        methods.on_epoch_begin = on_epoch_begin
        methods.on_train_batch_end = lambda batch, logs=None: on_batch(batch, self._filtered(logs))
        methods.on_epoch_end = lambda epoch, logs=None: on_epoch(epoch, self._filtered(logs))

    def add(self, names: Collection[str], few: Sequence[str], show: str | tuple[str, ...]) -> None:
        """Adds a callback; arguments as in `hide_in_progress_bar`."""
        self._names |= {*names}
        if show == "auto":
            self._few += few
        else:
            self._chosen += show

    def _filtered(self, logs: Logs | None) -> Logs:
        """The logs without the callbacks' values that the bar doesn't show."""
        logs = logs or {}
        new = [name for name in self._few if name in logs and name not in self._hidden and name not in self._shown]
        if new:
            self._show_what_fits(new, logs)
        return {name: value for name, value in logs.items() if name not in self._names or name in self._shown}

    def _show_what_fits(self, new: Sequence[str], logs: Logs) -> None:
        """Adds the `new` names that fit into the line beside other values, which validation doubles.

        A name that is shown once stays until the end of the epoch.
        """
        counter = 2 * len(str(self._steps)) + 2 if self._steps else len("      1/Unknown")
        left = shutil.get_terminal_size().columns - counter - _BAR - _TIMES
        others = [name for name in logs if name not in self._names and not name.startswith("val_")]
        left -= sum(_width(name, logs[name]) for name in (*others, *self._shown) if name in logs)
        if self._validates:
            left -= sum(_width(f"val_{name}", logs[name]) for name in others)
        for name in new:
            width = _width(name, logs[name])
            if width <= left:
                self._shown.append(name)
                left -= width
            else:
                self._hidden.add(name)


def _width(name: str, value: Any) -> int:
    """The number of characters that a value takes, with room for one more digit."""
    number = float(value)
    return len(name) + _AROUND + len(f"{number:.4f}" if abs(number) > 1e-3 else f"{number:.4e}")
