"""Checks of arguments, for the whole package: each returns the plain value, or raises a `ValueError` that names it.

Every constructor, function and command validates its arguments with these before it builds anything. NumPy scalars are
converted to Python's, so that the values can go into a config. Neither Keras nor TensorFlow is imported here, so a
command can reject bad arguments at once.

All take the argument's `name` and `value`. `optional` allows `None`, which is returned unchanged. `example` is what to
write instead, for the message: a value, or code where functions and instances are expected.
"""

import difflib
import inspect
import math
import operator
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = 2**63 - 1
_NAME_BYTES, _PATH_BYTES = 255, 4096
_MOST_ITEMS = 10_000
_NO_CHOICE = object()

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 120
_short.maxlevel = 3


def quote(value: object) -> str:
    """Quotes a value in an error message: on one line, of at most 200 characters."""
    try:
        text = " ".join(_short.repr(value).split())
    except ValueError:  # an integer has more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:197]}..."


def refusal(name: str, value: object, expected: str, example: str | None = None) -> ValueError:
    """The error for an argument: what was found, what was expected and, with `example`, what to type instead.

    Example:

    >>> from keras_paragrad.arguments import refusal
    >>> print(refusal("steps", 0, "an integer of at least 1", "4"))
    `steps` is 0, and must be an integer of at least 1. Write steps=4.
    """
    advice = f" Write {name}={example}." if example else ""
    return ValueError(f"`{name}` is {quote(value)}, and must be {expected}.{advice}")


def did_you_mean(name: object, known: Sequence[str]) -> str:
    """Suggests the closest known name, as a question to append to a message; empty if none is close."""
    close = difflib.get_close_matches(str(name)[:100], known, 1)
    return f" Did you mean {quote(close[0])}?" if close else ""


def check_integer(
    name: str,
    value: object,
    *,
    least: int = 1,
    most: int = LARGEST,
    also: Sequence[object] = (),
    example: object = None,
    optional: bool = False,
) -> Any:
    """An integer from `least` to `most`, also of a NumPy type, or one of `also`; other booleans are refused."""
    if value is None and optional:
        return None
    choice = _chosen(value, also)
    if choice is not _NO_CHOICE:
        return choice
    integer = _integer(value)
    if integer is None or not least <= integer <= most:
        # The default maximum is shown only if the value is larger.
        bounds = f"from {least} to {most}" if most < LARGEST or (integer or 0) > most else f"of at least {least}"
        expected = ", ".join([*map(repr, also), f"an integer {bounds}"])
        raise refusal(name, value, _or_none(expected, optional), _text(example))
    return integer


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = True,
    example: object = None,
    optional: bool = False,
) -> Any:
    """A number within bounds, as an `int` or `float`; booleans, text, NaN and, if `finite`, infinity are refused."""
    if value is None and optional:
        return None
    number = _number(value)
    is_valid = (
        number is not None
        and (math.isfinite(number) or not finite)
        and not (
            (least is not None and number < least)
            or (above is not None and number <= above)
            or (most is not None and number > most)
            or (below is not None and number >= below)
        )
    )
    if not is_valid:
        words = {"of at least": least, "above": above, "of at most": most, "below": below}
        bounds = " and ".join(f"{word} {bound:.12g}" for word, bound in words.items() if bound is not None)
        if least is not None and most is not None:
            bounds = f"from {least:.12g} to {most:.12g}"
        expected = f"a finite number {bounds}".strip() if finite else f"a number {bounds}".strip()
        raise refusal(name, value, _or_none(expected, optional), _text(example))
    return number


def check_flag(name: str, value: object, *, optional: bool = False) -> Any:
    """`True` or `False`, also as NumPy booleans."""
    return check_choice(name, value, (True, False, None) if optional else (True, False))


def check_choice(name: str, value: object, choices: Sequence[object]) -> Any:
    """One of the given strings and constants (`True`, `False`, `None`); 1 and 0 are not accepted for booleans."""
    choice = _chosen(value, choices)
    if choice is _NO_CHOICE:
        *others, last = (repr(choice) for choice in choices)
        raise refusal(name, value, f"{', '.join(others)} or {last}" if others else last)
    return choice


def check_text(name: str, value: object, *, example: str | None = None, optional: bool = False) -> Any:
    """A non-empty string, as a `str`."""
    if value is None and optional:
        return None
    plain = _plain(value)
    if not isinstance(plain, str) or not plain.strip():
        raise refusal(name, value, _or_none("a non-empty string", optional), _text(example))
    return str(plain)


def check_path(
    name: str,
    value: object,
    *,
    directory: bool = False,
    example: str | None = None,
    optional: bool = False,
) -> Any:
    """A path on this machine's file system; if `directory`, no file."""
    if value is None and optional:
        return None
    expected = _or_none("a directory" if directory else "a path", optional)
    try:
        text = os.fspath(value)  # pyright: ignore
        raw = os.fsencode(text)
    except (TypeError, ValueError):  # no path, or no file system allows these characters
        raise refusal(name, value, expected, _text(example)) from None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise refusal(name, value, expected, _text(example))
    if len(raw) > _PATH_BYTES or max(map(len, raw.split(b"/"))) > _NAME_BYTES:
        raise refusal(name, value, f"{expected}; this one, of {len(raw)} bytes, is too long", _text(example))
    if "://" in text:
        raise refusal(name, value, f"{expected} on a local or mounted file system", _text(example))
    path = Path(text)
    if directory and _is_file(path):
        raise refusal(name, value, f"{expected}; this is a file", _text(example))
    return path


def check_function(
    name: str, value: object, *, what: str = "a function", example: str | None = None, optional: bool = False
):
    """A callable that is not a class."""
    if value is None and optional:
        return None
    if not callable(value) or isinstance(value, type):
        raise refusal(name, value, _or_none(what, optional), example)
    return value


def check_choice_or_function(name: str, value: object, choices: Sequence[str], parameters: Sequence[str]) -> Any:
    """One of the given strings, or a function that can be called with as many arguments as there are `parameters`."""
    if callable(value) and not isinstance(value, type) and _takes(value, len(parameters)):
        return value
    choice = _chosen(value, choices)
    if choice is _NO_CHOICE:
        raise refusal(name, value, f"{', '.join(map(repr, choices))} or a function of ({', '.join(parameters)})")
    return choice


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with `count` positional arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # of a builtin
        return True
    return True


def check_instance(
    name: str,
    value: object,
    kinds: type | tuple[type, ...],
    what: str,
    *,
    example: str | None = None,
    optional: bool = False,
) -> Any:
    """An instance of some classes; `what` is the name of one in the message, such as "a Keras model"."""
    if value is None and optional:
        return None
    if not issubclass(type(value), kinds):
        raise refusal(name, value, _or_none(what, optional), example)
    return value


def check_parts(deterministic: object) -> int:
    """Validates the argument `deterministic`: returns the number of parts of a batch, 8 for `True`, or `False`."""
    parts = check_integer("deterministic", deterministic, least=2, most=1024, also=(True, False), example=8)
    return 8 if parts is True else parts


def check_each(
    name: str, values: Any, check: Callable[..., Any], what: str, *, example: str | None = None
) -> tuple[Any, ...]:
    """A sequence or set whose items a check of this module accepts, as a tuple of what it returns; no text.

    `what` is the name of the items in the message, such as "numbers from 0 to 1".
    """
    if isinstance(values, (str, bytes, bytearray, Mapping)):
        raise refusal(name, values, what, example)
    try:
        items = tuple(values) if len(values) <= _MOST_ITEMS else None
    except TypeError:  # it has no length
        items = None
    if items is None:
        raise refusal(name, values, what, example)
    return tuple(check(f"{name}[{index}]", item) for index, item in enumerate(items))


def _plain(value: Any) -> Any:
    """The value of a NumPy scalar or an array without axes; anything else unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _chosen(value: object, choices: Sequence[object]) -> object:
    """The choice that equals a value, or `_NO_CHOICE`; constants are compared by identity, so 1 isn't `True`."""
    plain = _plain(value)
    for choice in choices:
        if plain is choice or (isinstance(plain, str) and plain == choice):
            return choice
    return _NO_CHOICE


def _integer(value: object) -> int | None:
    """A value as an int, if it is a whole number; else `None`."""
    plain = _plain(value)
    if isinstance(plain, bool):
        return None
    try:
        return operator.index(plain)
    except TypeError:
        return None


def _number(value: object) -> int | float | None:
    """A value as an int or a float; `None` if it is not a number, or is NaN."""
    plain = _plain(value)
    if isinstance(plain, (bool, str, bytes, bytearray)):
        return None
    whole = _integer(plain)
    try:
        # NumPy converts an array of one element to a float, and warns.
        number = float(plain if whole is None else whole) if getattr(plain, "shape", ()) == () else math.nan
    except (TypeError, ValueError, OverflowError):  # not a number, or too large for a float
        return None
    if math.isnan(number):
        return None
    return number if whole is None else whole


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except OSError:  # it can't be inspected; the later write raises the error
        return False


def _or_none(expected: str, optional: bool) -> str:
    return f"{expected}, or None" if optional else expected


def _text(example: object) -> str | None:
    return None if example is None else repr(example)
