"""The rules of this package, one module per kind of layer. Each registers its own: a module added here is found."""

import importlib
import pkgutil


def import_rules() -> list[str]:
    """Imports every module of this package, and returns their names."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    for name in names:
        importlib.import_module(f"{__name__}.{name}")
    return names


import_rules()
