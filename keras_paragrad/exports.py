"""Public names: imported on first access, and with the signatures of the functions that they pass options to."""

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def lazily(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the `__getattr__` and `__dir__` of a package (PEP 562).

    Most scripts need a few components only, and importing all of them is slow. Type checkers read the same names under
    `TYPE_CHECKING`.

    Args:
        package: The package's `__name__`.
        modules: Maps each public name to the module that defines it, relative to the package; a subpackage maps to
            itself.

    Returns:
        `__getattr__`, which imports the module and caches the name in the package's namespace, and `__dir__`.
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        namespace[name] = module if name == modules[name] else getattr(module, name)
        return namespace[name]

    return get, lambda: sorted({*namespace, *modules})


def passing_options_to(function: Callable[..., Any], *, without: Collection[str] = ()) -> Callable[[F], F]:
    """Decorates a function with `**options`, for `help()` and `inspect.signature` to show those of another function.

    Args:
        function: The function or class that gets the options.
        without: Its parameters that the decorated function passes itself.
    """
    inner = inspect.signature(function).parameters.values()

    def decorate(decorated: F) -> F:
        signature = inspect.signature(decorated)
        outer = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            each.replace(kind=each.KEYWORD_ONLY)
            for each in inner
            if each.name not in signature.parameters
            and each.name not in without
            and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        ]
        vars(decorated)["__signature__"] = signature.replace(parameters=[*outer, *options])
        return decorated

    return decorate


def with_arguments_of(
    source: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Decorates a method that passes its arguments on with the signature of another function or class."""
    parameters = inspect.signature(source).parameters.values()

    def decorate(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        returned = inspect.signature(method).return_annotation
        signature = inspect.Signature([first, *parameters], return_annotation=returned)

        @functools.wraps(method)
        def call(*arguments: Any, **keywords: Any) -> R:
            try:
                signature.bind(*arguments, **keywords)
            except TypeError as error:
                raise TypeError(f"{method.__qualname__}() {error}") from None
            return method(*arguments, **keywords)

        vars(call)["__signature__"] = signature
        return call

    return decorate


def modules_of(package: ModuleType) -> list[ModuleType]:
    """Imports every module of a package, in alphabetical order, so that a new file registers itself."""
    return [
        importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)
    ]
