"""Public names that a package imports when they are first asked for."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the `__getattr__` and `__dir__` of a package, as of PEP 562.

    Importing all components takes longer than most scripts need them for; type checkers read the same names under
    `TYPE_CHECKING`.

    Args:
        package: The package's `__name__`.
        modules: By public name, the module that has it, relative to the package. A subpackage has its own name.

    Returns:
        `__getattr__`, which imports the module and keeps what it found in the package, and `__dir__`.
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        namespace[name] = module if name == modules[name] else getattr(module, name)
        return namespace[name]

    return get, lambda: sorted({*namespace, *modules})
