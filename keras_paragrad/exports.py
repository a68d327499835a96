"""Public names: imported on first access, and with the signatures of the functions that they pass options to."""

import dis
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes the `__getattr__`, `__dir__` and `__all__` of a package (PEP 562).

    Most scripts need a few components only, and importing all of them is slow. A package writes each public name once,
    where type checkers look for it: `if TYPE_CHECKING: from keras_paragrad.inputs.jacobian import input_jacobian as
    input_jacobian`. A decorator at the definition would be found only after importing everything.

    `__getattr__` imports the module of a name, and caches the name in the package's namespace.
    """
    namespace, homes = vars(sys.modules[package]), dict(_public_imports(package))
    # The modules directly in the package that the names come from; for an import of a module, its own name.
    modules = {home.removeprefix(package)[1:].partition(".")[0] or name for name, home in homes.items()}

    def get(name: str) -> Any:
        if name in modules:
            value: Any = importlib.import_module(f"{package}.{name}")
        elif name in homes:
            value = getattr(importlib.import_module(homes[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value
        return value

    return get, lambda: sorted({*homes, *(name for name in namespace if name.startswith("__"))}), sorted(homes)


def _public_imports(package: str) -> Iterator[tuple[str, str]]:
    """What a package imports from itself by a name without `_`, and the module that it imports each from.

    They are read from its code, which also has the imports that don't run, and is installed without the source too.
    """
    spec: Any = sys.modules[package].__spec__
    home, before = "", ""
    for operation, name in ((each.opname, each.argval) for each in dis.get_instructions(spec.loader.get_code(package))):
        if operation == "IMPORT_NAME":
            home = name
        elif (before, operation) == ("IMPORT_FROM", "STORE_NAME") and f"{home}.".startswith(f"{package}."):
            yield from () if name.startswith("_") else [(name, home)]
        before = operation


def passing_options_to(function: Callable[..., Any], *, without: Collection[str] = ()) -> Callable[[F], F]:
    """Decorates a function with `**options`, so that `help()` and `inspect.signature` show another function's options.

    `without` has those that the decorated function passes itself.
    """
    inner = inspect.signature(function).parameters.values()

    def decorate(decorated: F) -> F:
        signature = inspect.signature(decorated)
        outer = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        options = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in inner
            if parameter.name not in signature.parameters
            and parameter.name not in without
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        vars(decorated)["__signature__"] = signature.replace(parameters=[*outer, *options])
        return decorated

    return decorate


def with_arguments_of(
    source: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Gives a method the signature of the function or class that it passes its arguments on to.

    Arguments that don't match the signature raise a `TypeError` that names the method.
    """
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
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
