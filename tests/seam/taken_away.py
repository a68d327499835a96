"""Takes private names of Keras and TensorFlow away from the package alone: Keras and TensorFlow keep them."""

import contextlib
import functools
import gc
import sys
import types
from collections.abc import Collection, Generator, Iterator
from pathlib import Path

from seam.seam_uses import SEAM, private_attributes

from keras_paragrad.compat.names import NAMES, Hook
from keras_paragrad.compat.private import StandIn, stand_in_for

TAKEN = "_taken_away"


@contextlib.contextmanager
def without(parts: Collection[str]) -> Generator[None]:
    """Context in which the package's code has no name of some parts, unless another part has one of that name.

    Attributes that it asks for by a string stay.
    """
    kept = {_last(hook) for part, hooks in NAMES.items() if part not in parts for hook in hooks}
    hooks = {_last(hook): hook for part in parts for hook in NAMES[part] if _last(hook) not in kept}
    with contextlib.ExitStack() as stack:
        for module in _modules():
            _take_imports(stack, module, hooks)
            gone = _foreign(module.__name__) & hooks.keys()
            for function in _functions(module.__name__) if gone else ():
                before = function.__code__
                function.__code__ = _renamed(before, gone)
                stack.callback(setattr, function, "__code__", before)
        yield


def _last(hook: Hook) -> str:
    return hook.path.rpartition(".")[2] or hook.module.rpartition(".")[2]


def _modules() -> list[types.ModuleType]:
    prefixes = tuple(f"keras_paragrad.{folder}." for folder in SEAM)
    return [module for name, module in list(sys.modules.items()) if name.startswith(prefixes)]


def _take_imports(stack: contextlib.ExitStack, module: types.ModuleType, hooks: dict[str, Hook]) -> None:
    namespace = vars(module)
    for name in namespace.keys() & hooks.keys():
        value = namespace[name]
        ours = getattr(value, "__module__", "") or ""
        if not isinstance(value, StandIn) and not str(ours).startswith("keras_paragrad"):
            namespace[name] = stand_in_for(hooks[name])
            stack.callback(namespace.__setitem__, name, value)


@functools.cache
def _foreign(module: str) -> frozenset[str]:
    """The private attributes that a module uses of others' objects."""
    source = Path(sys.modules[module].__file__ or "").read_text("utf-8")
    return frozenset(private_attributes(source, module))


def _functions(module: str) -> Iterator[types.FunctionType]:
    return (each for each in gc.get_objects() if type(each) is types.FunctionType and each.__module__ == module)


def _renamed(code: types.CodeType, names: Collection[str]) -> types.CodeType:
    inner = tuple(_renamed(each, names) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=inner, co_names=tuple(TAKEN if name in names else name for name in code.co_names))
