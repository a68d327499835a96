"""Checksums of Python code that don't depend on where its file is, and the names that code uses."""

import base64
import dis
import hashlib
import inspect
import marshal
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_LIBRARIES = ("keras", "tensorflow", "numpy", "builtins", "abc", "typing", "collections", "keras_paragrad")


def is_of_a_library(kind: type | Any) -> bool:
    """Whether the code of a class or function is determined by the version of a library."""
    return (getattr(kind, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def digest_of_code(code: CodeType) -> str:
    """A checksum of code, regardless of its file, line numbers and the names of local variables."""
    return hashlib.sha256(repr(_parts(code)).encode()).hexdigest()[:8]


def digest_of_class(kind: type) -> str:
    """A checksum of the code of a class and of its bases, except a library's."""
    codes = [digest_of_code(code) for code in codes_of_class(kind)]
    return hashlib.sha256(repr(codes).encode()).hexdigest()[:8]


def codes_of_class(kind: type) -> Iterator[CodeType]:
    """The code of each function of a class and of its bases, except a library's, in a fixed order."""
    for base in inspect.getmro(kind):
        if is_of_a_library(base):
            continue
        for _, member in sorted(vars(base).items()):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield inspect.unwrap(function).__code__


def marshalled_code(text: str) -> CodeType | None:
    """The code of a `lambda`, as Keras serializes it in a config; `None` if a text isn't one."""
    if len(text) < 60 or not text.startswith("4w"):
        return None
    try:
        code = marshal.loads(base64.b64decode(text))
    except (EOFError, TypeError, ValueError):
        return None
    return code if isinstance(code, CodeType) else None


def names_in(code: CodeType) -> set[str]:
    """The attributes, methods and globals that code and its nested functions refer to."""
    return set(code.co_names).union(*(names_in(inner) for inner in _inner(code)))


def attributes_set_on_others(code: CodeType) -> set[str]:
    """The attributes that code sets on anything but its first argument, which is `self` in a method."""
    own = code.co_varnames[0] if code.co_argcount else None
    found: set[str] = set()
    augmented: set[str] = set()
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("CACHE", "EXTENDED_ARG", "NOP"):
            continue
        previous = [_loaded(each) for each in before[-2:]]
        if instruction.opname == "LOAD_ATTR" and before and before[-1].opname == "COPY" and previous[0] == own:
            # The first half of `self.count += 1`.
            augmented.add(instruction.argval)
        if instruction.opname == "STORE_ATTR" and own is not None:
            is_own = previous[-1] == own or (before[-1].opname == "SWAP" and instruction.argval in augmented)
        else:
            is_own = instruction.opname != "STORE_ATTR"
        if not is_own:
            found.add(instruction.argval)
        before.append(instruction)
    return found.union(*(attributes_set_on_others(inner) for inner in _inner(code)))


def _loaded(instruction: dis.Instruction) -> Any:
    """The local variable that an instruction pushes onto the stack, if any."""
    if not instruction.opname.startswith("LOAD_FAST"):
        return None
    return instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _parts(code: CodeType) -> tuple:
    constants = [_parts(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_argcount


def _constant(value: Any) -> str:
    # A set is unordered.
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
