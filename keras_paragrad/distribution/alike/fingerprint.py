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

# Arguments of `fit` that hold data. Only which of them are given is compared here; the data, where it is read.
_DATA = ("x", "y", "sample_weight", "validation_data")
# How data is read, and how much is shown.
_FREE = ("verbose", "callbacks", "cache", "prefetch", "seed", "self")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that determine what is computed."""
    names = ("keras", "tensorflow", "numpy", "keras_paragrad")
    return {"python": "{}.{}".format(*sys.version_info), **{name: _version(name) for name in names}}


def fingerprint(
    model: Any, options: Mapping[str, Any] | None = None, arguments: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Everything that shapes a worker's training, the same on workers that compute the same.

    It covers the versions of Python and the packages, Keras's settings, `DistributedFit`'s decisions, the model's
    layers and how they are connected, the optimizer, the loss, the metrics, the arguments of `fit`, and the callbacks
    that can shape the computation. Functions and custom classes are represented by a checksum of their code.
    Automatic names, seeds, paths and `verbose` are left out.
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
    """The arguments of a call by name, including defaults."""
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
