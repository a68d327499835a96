"""Checks that the installed Keras and TensorFlow have the private names that the package uses, its *hooks*."""

import dis
import importlib
import inspect
import types
from collections.abc import Iterable
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_paragrad.compat.names import NAMES, Hook

# Releases in which `make compat` finds every name.
KNOWN_TO_WORK = "keras 3.10 with tensorflow 2.19, 3.12 with 2.20, and 3.15 with 2.21"
MISSING = "is missing"
# The parts whose names were found.
FOUND: set[str] = set()


def check_backend() -> None:
    """Raises an `ImportError` where Keras runs on another backend."""
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"keras_paragrad requires Keras's TensorFlow backend, and this Keras runs on {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=tensorflow in the environment before the first `import keras`."
        )


def check_internals(*parts: str) -> None:
    """Looks for the private names of some parts of the package, once per process; call it where a component is made.

    Args:
        parts: Keys of `names.NAMES`.

    Raises:
        ImportError: A name is missing or takes other parameters. The message names all that are missing.
    """
    if missing := [hook for part in parts if part not in FOUND for hook in NAMES[part] if problem(hook)]:
        raise_missing(missing)
    FOUND.update(parts)


def raise_missing(hooks: Iterable[Hook]) -> NoReturn:
    """Raises the `ImportError` of names that the installed Keras and TensorFlow lack."""
    problems = "; ".join(
        f"{hook.module}:{hook.path} {problem(hook) or MISSING} "
        f"(needed for {', '.join(part for part, needed in NAMES.items() if hook in needed)})"
        for hook in hooks
    )
    raise ImportError(
        f"keras_paragrad cannot work with the installed keras {keras.__version__} and tensorflow {tf.__version__}: "
        f"{problems}. Known to work: {KNOWN_TO_WORK}. Install those, or a keras_paragrad that knows these versions."
    )


def problem(hook: Hook) -> str | None:
    """What is wrong with a name: it is missing, or no longer takes a parameter; `None` if nothing is."""
    if hook.optional:
        return None
    owner, _, attribute = hook.path.rpartition(".")
    try:
        value = lookup(hook, owner if hook.assigned else hook.path)
    except (ImportError, AttributeError):
        return MISSING
    if hook.assigned:
        return None if _assigns(value, attribute) else MISSING
    parameters = inspect.signature(value).parameters if hook.parameters else {}
    absent = [name for name in hook.parameters if name not in parameters]
    return f"no longer takes {', '.join(absent)}" if absent else None


def lookup(hook: Hook, path: str) -> Any:
    """Returns the object at a dotted path in a hook's module."""
    value: Any = importlib.import_module(hook.module)
    for name in path.split(".") if path else ():
        value = getattr(value, name)
    return value


def _assigns(owner: type, attribute: str) -> bool:
    """Whether a method of a class, by its bytecode, assigns to an attribute."""
    members = [inspect.unwrap(member) for base in owner.__mro__ for member in vars(base).values() if callable(member)]
    codes = [member.__code__ for member in members if isinstance(member, types.FunctionType)]
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == attribute
        for code in codes
        if attribute in code.co_names
        for instruction in dis.get_instructions(code)
    )
