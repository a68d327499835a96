"""The private modules, classes and functions of Keras and TensorFlow: the one place that says where they are.

`from keras_paragrad.compat.private import CompileLoss` finds it where `names.py` says. A name that the installed
releases lack becomes a stand-in, so that only what needs it fails, with the error of `check.check_internals`.
"""

import importlib
from typing import Any, NoReturn

from keras_paragrad.compat.check import lookup, raise_missing
from keras_paragrad.compat.names import HOOKS, Hook


class StandIn(type):
    """The metaclass of stand-ins for missing names."""

    hook: Hook

    def __call__(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        raise_missing([cls.hook])

    def __getattr__(cls, name: str) -> NoReturn:
        # Python and tools read these of every class.
        if name.startswith("__"):
            raise AttributeError(name)
        raise_missing([cls.hook])


def stand_in_for(hook: Hook) -> StandIn:
    """Makes the stand-in for a missing name: a class, so that others can inherit from it, whose use raises."""
    return StandIn(hook.path.partition(".")[0], (), {"hook": hook})


# Reversed, as the first of several hooks with the same class says what needs the class.
_FOREIGN = [hook for hook in reversed(HOOKS) if hook.module.startswith(("keras.src", "tensorflow."))]
# By the name of each module, class or function that can be imported from here, where it is.
_HOOKS = {
    **{hook.module.rpartition(".")[2]: Hook(hook.module, "") for hook in _FOREIGN},
    **{hook.path.partition(".")[0]: hook for hook in _FOREIGN},
}


def __getattr__(name: str) -> Any:
    hook = _HOOKS.get(name)
    if hook is None:
        raise AttributeError(f"keras_paragrad/compat/names.py doesn't say where {name!r} is")
    try:
        if not hook.path:
            return importlib.import_module(hook.module)
        return lookup(hook, name)
    except (ImportError, AttributeError):
        return stand_in_for(hook)
