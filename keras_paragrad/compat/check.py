"""Checks that the installed Keras and TensorFlow have the private names that the package uses."""

import dis
import functools
import importlib
import inspect
import re
import threading
import types
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.names import ASSIGNED, HOOKS, OF_OBJECTS, Hook

KNOWN_TO_WORK = "keras 3.15 with tensorflow 2.21"
# The folders that may use private names.
_SEAM = ("compat", "engine", "storage")
_SAMPLE = "keras_paragrad_sample"
_THREAD = threading.local()


def check_hooks(hooks: Iterable[Hook] = HOOKS, assigned: Iterable[Hook] = ASSIGNED) -> None:
    """Raises one `ImportError` naming every name of a module or class that the installed Keras and TensorFlow lack.

    Args:
        hooks: Names in modules and classes.
        assigned: Attributes that a method of the class assigns.

    Raises:
        ImportError: A name is missing or takes other parameters, or Keras runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"keras_paragrad requires Keras's TensorFlow backend, and this Keras runs on {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=tensorflow in the environment before the first `import keras`."
        )
    _raise([*map(_problem, hooks), *map(_problem_of_code, assigned)])


def check_objects() -> None:
    """Raises one `ImportError` naming every attribute that instances lack; checks once per process.

    Raises:
        ImportError: An attribute is missing, or a small model can't be made.
    """
    # Not at import: it takes some 20 ms, and loading a model doesn't need it.
    # Compiling the sample model may call a patched method that checks again.
    if not getattr(_THREAD, "is_sampling", False):
        check_samples()


@functools.cache
def check_samples() -> None:
    """Checks the attributes of sample objects; `check_objects` without its guard against recursion."""
    try:
        # In another thread: Keras keeps its name counters, seeds, dtype policy and scopes by thread.
        with ThreadPoolExecutor(max_workers=1) as executor:
            samples = executor.submit(_make_samples).result()
    except Exception as error:
        _raise([f"a small model can't be made ({type(error).__name__}: {error})"], error)
    else:
        _raise([_problem_of_object(hook, samples) for hook in OF_OBJECTS])


def _make_samples() -> list[object]:
    """One instance of each class in `OF_OBJECTS`."""
    # At import, a missing name would raise before `check_hooks` can explain it.
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


def _raise(problems: Iterable[str | None], cause: Exception | None = None) -> None:
    missing = [problem for problem in problems if problem]
    if missing:
        raise ImportError(
            f"keras_paragrad cannot work with the installed keras {keras.__version__} and tensorflow "
            f"{tf.__version__}: {'; '.join(missing)}. Known to work: {KNOWN_TO_WORK}. "
            "Install those, or a keras_paragrad that knows these versions."
        ) from cause


def _lookup(hook: Hook, path: str) -> Any:
    value: Any = importlib.import_module(hook.module)
    for name in path.split(".") if path else ():
        value = getattr(value, name)
    return value


def _missing(hook: Hook) -> str:
    return f"{hook.module}:{hook.path} is missing (used by {_users(hook)})"


def users(hook: Hook) -> list[str]:
    """The modules that use a name; for a private one, only those in the folders that may."""
    package = Path(__file__).parents[1]
    name = hook.path.rpartition(".")[2] or hook.module.rpartition(".")[2]
    is_private, pattern = name.startswith("_"), re.compile(rf"\b{name}\b")
    sources = {path: source for path, source in _sources(package).items() if path.parts[0] in _SEAM or not is_private}
    paths = [path.with_suffix("") for path, source in sources.items() if pattern.search(source)]
    return [".".join((package.name, *path.parts)) for path in paths]


@functools.cache
def _sources(package: Path) -> dict[Path, str]:
    paths = [path for path in sorted(package.rglob("*.py")) if path.name != "names.py"]
    return {path.relative_to(package): path.read_text("utf-8") for path in paths}


def _users(hook: Hook) -> str:
    return ", ".join(users(hook))


def _problem(hook: Hook) -> str | None:
    """What a hook lacks: the name itself, or a parameter of it; `None` if nothing."""
    try:
        value = _lookup(hook, hook.path)
    except (ImportError, AttributeError):
        return _missing(hook)
    parameters = inspect.signature(value).parameters if hook.parameters else {}
    absent = [name for name in hook.parameters if name not in parameters]
    if not absent:
        return None
    return f"{hook.module}:{hook.path} no longer takes {', '.join(absent)} (used by {_users(hook)})"


def _problem_of_code(hook: Hook) -> str | None:
    """What is missing of a hook that a class's methods assign; `None` if nothing."""
    owner, _, attribute = hook.path.rpartition(".")
    try:
        cls = _lookup(hook, owner)
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


def _problem_of_object(hook: Hook, samples: Iterable[object]) -> str | None:
    """What is missing of a hook that only instances have, such as an attribute set in `__init__`; else `None`."""
    owner, _, attribute = hook.path.rpartition(".")
    try:
        cls = _lookup(hook, owner)
    except (ImportError, AttributeError):
        return _missing(hook)
    # Another class's instance may have an attribute of that name.
    return None if any(isinstance(each, cls) and hasattr(each, attribute) for each in samples) else _missing(hook)
