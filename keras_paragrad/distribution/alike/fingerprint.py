"""Everything that shapes a training, as entries that workers compare before its first step."""

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import keras

from keras_paragrad.distribution.alike.callbacks import callback_entries
from keras_paragrad.distribution.alike.models import model_entries, settings_entries
from keras_paragrad.distribution.alike.values import entries_of

# Arguments of `fit` that are the user's data, of which only is compared which of them are given: the data are compared
# by those who read them.
_DATA = ("x", "y", "sample_weight", "validation_data")
# How data are read, and how much is shown.
_FREE = ("verbose", "callbacks", "cache", "prefetch", "seed", "self")


def versions() -> dict[str, str]:
    """The versions that decide what code does and what it computes."""
    names = ("keras", "tensorflow", "numpy", "keras_paragrad")
    return {"python": "{}.{}".format(*sys.version_info), **{name: _version(name) for name in names}}


def fingerprint(
    model: Any, options: Mapping[str, Any] | None = None, arguments: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """What a training is made of, the same on workers that compute the same.

    It has the versions of Python and the packages, Keras's settings, `DistributedFit`'s decisions, the model's layers
    and how they are connected, the optimizer, the loss, the metrics, the arguments of `fit`, and the callbacks that can
    shape the computation. Of functions and of classes of your own it has a checksum of their code. Names that Keras
    counts, seeds, paths and `verbose` are left out.

    Args:
        model: A compiled model.
        options: What `DistributedFit` was asked for and decided.
        arguments: The arguments of `fit`, by name; `None` before it is called.

    Returns:
        Short texts by what they are of, in the order in which an error should name them.
    """
    found = {f"version of {name}": number for name, number in versions().items()}
    found.update(settings_entries())
    found.update(entries_of("DistributedFit", dict(options or {})))
    if arguments is not None:
        given = {name: value for name, value in arguments.items() if name not in (*_DATA, *_FREE)}
        found.update(entries_of("fit", given))
        found.update({f"fit.{name}": "given" if arguments.get(name) is not None else "not given" for name in _DATA})
        found.update(callback_entries(keras.tree.flatten(arguments.get("callbacks") or [])))
    found.update(model_entries(model))
    return found


def arguments_of(function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with those that were left out.

    Raises:
        TypeError: The function does not take them.
    """
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.update(found.pop(name))
    return found


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", None) or version(name))
