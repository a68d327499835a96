"""Checks that the installed Keras and TensorFlow have the private names that the package uses, its *hooks*."""

import dis
import functools
import importlib
import inspect
import re
import threading
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.names import NAMES, Hook

# Releases in which `make compat` finds every name.
KNOWN_TO_WORK = "keras 3.10 with tensorflow 2.19, 3.12 with 2.20, and 3.15 with 2.21"
# The folders that may use private names.
_SEAM = ("compat", "engine", "storage")
_SAMPLE = "keras_paragrad_sample"
_THREAD = threading.local()
# The parts whose names were found.
_FOUND: set[str] = set()


def check_backend() -> None:
    """Raises an `ImportError` where Keras runs on another backend."""
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"keras_paragrad requires Keras's TensorFlow backend, and this Keras runs on {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=tensorflow in the environment before the first `import keras`."
        )


def check_internals(*parts: str) -> None:
    """Looks for the private names of some parts of the package, once per process; call it where a component is made.

    Args:
        parts: Keys of `names.NAMES`.

    Raises:
        ImportError: A name is missing or takes other parameters, or a small model can't be made to look for attributes
            of instances. The message names all that are missing.
    """
    # Compiling the sample model may call a patched method that looks again.
    if getattr(_THREAD, "is_sampling", False):
        return
    if missing := [hook for part in parts if part not in _FOUND for hook in NAMES[part] if problem(hook)]:
        raise_missing(missing)
    _FOUND.update(parts)


def raise_missing(hooks: Iterable[Hook]) -> NoReturn:
    """Raises the `ImportError` of names that the installed Keras and TensorFlow lack."""
    _raise([problem(hook) or _missing(hook) for hook in hooks])


def problem(hook: Hook) -> str | None:
    """A description of what is missing: the name itself, or a parameter of it; `None` if nothing is."""
    return None if hook.optional else _PROBLEMS[hook.found](hook)


def forget() -> None:
    """Clears the cache of `check_internals`."""
    _FOUND.clear()
    samples.cache_clear()


@functools.cache
def samples() -> list[object]:
    """An instance of each class whose instances have hooked attributes; making them takes some 20 ms."""
    try:
        # In another thread: Keras keeps its name counters, seeds, dtype policy and scopes by thread.
        with ThreadPoolExecutor(max_workers=1) as executor:
            return executor.submit(_make_samples).result()
    except Exception as error:
        _raise([f"a small model can't be made ({type(error).__name__}: {error})"], error)


def _make_samples() -> list[object]:
    """Makes the objects of `samples` without a trace in Keras's or TensorFlow's global state."""
    # At import, a missing name would raise before `check_internals` can explain it.
    from keras.src.trainers.compile_utils import CompileLoss
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    _THREAD.is_sampling = True
    # In a graph nothing runs, so that devices can still be configured.
    with tf.Graph().as_default():
        # Random initializers would take a seed from Python's generator.
        layer = keras.layers.Dense(1, kernel_initializer="zeros", name=f"{_SAMPLE}_layer")
        model: keras.Model = keras.Sequential([keras.Input((1,), name=f"{_SAMPLE}_input"), layer], name=_SAMPLE)
        optimizer = keras.optimizers.SGD(name=f"{_SAMPLE}_optimizer")
        # With "auto", Keras would look for devices.
        model.compile(optimizer, loss="mse", jit_compile=False)
        optimizer.build(model.trainable_variables)
        output = keras.KerasTensor((1, 1), name=f"{_SAMPLE}_output")
        compile_loss = CompileLoss("mse")
        compile_loss.build(output, output)
        rows = np.zeros((1, 1), "float32")
        return [
            layer,
            layer.kernel,
            model,
            optimizer,
            compile_loss,
            keras.losses.MeanSquaredError(name=f"{_SAMPLE}_loss"),
            keras.metrics.MeanSquaredError(name=f"{_SAMPLE}_metric"),
            ArrayDataAdapter(rows, rows, batch_size=1),
            GeneratorDataAdapter(iter([(rows, rows)])),
            tf.function(lambda value: value),
        ]


def _raise(problems: Iterable[str], cause: Exception | None = None) -> NoReturn:
    raise ImportError(
        f"keras_paragrad cannot work with the installed keras {keras.__version__} and tensorflow "
        f"{tf.__version__}: {'; '.join(problems)}. Known to work: {KNOWN_TO_WORK}. "
        "Install those, or a keras_paragrad that knows these versions."
    ) from cause


def lookup(hook: Hook, path: str) -> Any:
    """Returns the object at a dotted path in a hook's module."""
    value: Any = importlib.import_module(hook.module)
    for name in path.split(".") if path else ():
        value = getattr(value, name)
    return value


def _missing(hook: Hook) -> str:
    return f"{hook.module}:{hook.path} is missing (used by {_users(hook)})"


def users(hook: Hook) -> list[str]:
    """The modules that use a name, in the folders that may use private names."""
    package = Path(__file__).parents[1]
    name = hook.path.rpartition(".")[2] or hook.module.rpartition(".")[2]
    # A name without an underscore may be an ordinary word, such as `context`: it counts as an attribute, or imported.
    imported = rf"^from keras_paragrad\.compat\.private import (?:\([^)]*|.*)\b{name}\b"
    pattern = re.compile(rf"\b{name}\b" if name.startswith("_") else rf"\.{name}\b|{imported}", re.MULTILINE)
    sources = {path: source for path, source in _sources(package).items() if path.parts[0] in _SEAM}
    paths = [path.with_suffix("") for path, source in sources.items() if pattern.search(source)]
    return [".".join((package.name, *path.parts)) for path in paths]


@functools.cache
def _sources(package: Path) -> dict[Path, str]:
    paths = [path for path in sorted(package.rglob("*.py")) if path.name != "names.py"]
    return {path.relative_to(package): path.read_text("utf-8") for path in paths}


def _users(hook: Hook) -> str:
    return ", ".join(users(hook))


def _problem_by_name(hook: Hook) -> str | None:
    """What a hook lacks: the name itself, or a parameter of it; `None` if nothing."""
    try:
        value = lookup(hook, hook.path)
    except (ImportError, AttributeError):
        return _missing(hook)
    parameters = inspect.signature(value).parameters if hook.parameters else {}
    absent = [name for name in hook.parameters if name not in parameters]
    if not absent:
        return None
    return f"{hook.module}:{hook.path} no longer takes {', '.join(absent)} (used by {_users(hook)})"


def _problem_of_code(hook: Hook) -> str | None:
    """The problem with an attribute that a class's methods should assign; `None` if one assigns it."""
    owner, _, attribute = hook.path.rpartition(".")
    try:
        cls = lookup(hook, owner)
    except (ImportError, AttributeError):
        return _missing(hook)
    return None if _assigns(cls, attribute) else _missing(hook)


def _assigns(owner: type, attribute: str) -> bool:
    """Whether a method of a class, by its bytecode, assigns to an attribute."""
    members = [inspect.unwrap(member) for base in owner.__mro__ for member in vars(base).values() if callable(member)]
    codes = [member.__code__ for member in members if isinstance(member, types.FunctionType)]
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == attribute
        for code in codes
        if attribute in code.co_names
        for instruction in dis.get_instructions(code)
    )


def _problem_of_object(hook: Hook) -> str | None:
    """The problem with an attribute that only instances have, such as one set in `__init__`; `None` if it is there."""
    owner, _, attribute = hook.path.rpartition(".")
    try:
        cls = lookup(hook, owner)
    except (ImportError, AttributeError):
        return _missing(hook)
    # Another class's instance may have an attribute with the same name.
    return (
        None if any(isinstance(sample, cls) and hasattr(sample, attribute) for sample in samples()) else _missing(hook)
    )


_PROBLEMS: dict[str, Callable[[Hook], str | None]] = {
    "by name": _problem_by_name,
    "assigned": _problem_of_code,
    "on instances": _problem_of_object,
}
