"""Which private names of Keras and TensorFlow a module of the seam uses, found in its source."""

import ast
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

import keras_paragrad

PACKAGE = Path(keras_paragrad.__file__).parent
SEAM = ("compat", "engine", "storage")
_NAMED_TUPLE = {"_replace", "_asdict", "_fields"}
_OURS = "_keras_paragrad"
_PUBLIC = {("tensorflow.experimental", "dtensor")}
_PRIVATE = re.compile(r"_[A-Za-z]\w*")


def private_imports(source: str) -> set[tuple[str, str]]:
    """The private modules that are imported, each with the name that is taken from it, or an empty one."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    private = {(module, name) for module, name in found if module.startswith(("keras.src", "tensorflow."))}
    return private - _PUBLIC


def imports_of_ours(source: str) -> set[str]:
    """What is taken from `compat.private`."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports if node.module == "keras_paragrad.compat.private" for alias in node.names}


def private_attributes(source: str, module: str | None = None) -> set[str]:
    """The private names of others' objects, spelled as attributes, overriding methods, keywords or strings.

    Args:
        source: The source of a module.
        module: Its name. In its classes, `self._name` is ours unless a base of Keras or TensorFlow has that name.
    """
    return set(_attributes(ast.parse(source), vars(importlib.import_module(module)) if module else {}, None))


def _attributes(node: ast.AST, namespace: dict, inside: type | None) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            known = namespace.get(child.name, object)
            yield from _attributes(child, vars(known), known)
            continue
        yield from _named_by(child, inside)
        yield from _attributes(child, namespace, inside)


def _named_by(node: ast.AST, inside: type | None) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        owner = node.value
        last = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        on_self = isinstance(owner, ast.Name) and last in ("self", "cls")
        if (
            node.attr == "__internal__"
            or (last == "extended" and not hasattr(tf.compat.v1.distribute.StrategyExtended, node.attr))
            or (_is_private(node.attr) and not (on_self and inside and node.attr not in _foreign_names(inside)))
        ):
            yield node.attr
    elif isinstance(node, ast.FunctionDef) and inside and node.name in _foreign_names(inside):
        yield from [node.name] if _is_private(node.name) else []
    elif isinstance(node, ast.keyword) and node.arg and _is_private(node.arg):
        yield node.arg
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value):
        yield node.value


def _is_private(name: str) -> bool:
    return bool(_PRIVATE.fullmatch(name)) and name not in _NAMED_TUPLE and not name.startswith(_OURS)


def _foreign_names(ours: type) -> set[str]:
    """What the bases of a class of ours that come from Keras and TensorFlow define and assign."""
    bases = [base for base in ours.__mro__ if base.__module__.startswith(("keras.", "tensorflow."))]
    names = {name for base in bases for name in vars(base)}
    members = [inspect.unwrap(value) for base in bases for value in vars(base).values() if callable(value)]
    codes = [member.__code__ for member in members if isinstance(member, types.FunctionType)]
    return names | {name for code in codes for name in code.co_names}
