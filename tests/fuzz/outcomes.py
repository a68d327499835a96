"""What becomes of a case: the same as plain Keras, refused, by design, or a finding."""

import contextlib
import functools
import logging
import os
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

# TensorFlow is set up by the process that runs a case, before these are used.
import keras
import numpy as np
import tensorflow as tf
from fuzz.cases import AXES, COMPONENTS, Case, read, settled, written
from fuzz.rules import applying
from fuzz.trainings import DEVICES, OurTraining, Trained, Training

# Of how far a training has moved the weights, and of what it shows. Float32 rounds the sums of a batch and of its parts
# differently: plain Keras with the rows of each batch in another order is as far off.
TOLERANCE = 5e-5
_FRAME = re.compile(r'^\s*File "([^"]+)", line', re.MULTILINE)


def outcomes(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Runs cases in this process, which does nothing else; plain Keras trains once for all that differ in components.

    Returns:
        Of each its `kind`; what it is `about`, in a line; all that was `said`; the largest `error`; how far the weights
        are `apart`, in parts of the largest; and the `seconds` it took.
    """
    set_up()
    found = []
    for text in texts:
        keras.utils.clear_session(free_memory=False)
        began = time.monotonic()
        found.append({**_judged(read(text)), "seconds": time.monotonic() - began})
    return found


def set_up() -> None:
    """Gives this process two devices, and errors that tell who raised them."""
    devices = [tf.config.LogicalDeviceConfiguration()] * len(DEVICES)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    keras.config.disable_traceback_filtering()
    tf.debugging.disable_traceback_filtering()


def _judged(case: Case) -> dict[str, Any]:
    rules = applying(case)
    try:
        with hearing() as said:
            found = OurTraining(case).run()
    except Exception as error:
        return _of_error(case, error)
    try:
        expected = _expected(case)
    except Exception as error:
        return _verdict("KERAS FAILS", said="".join(traceback.format_exception(error)), about=first_line(error))
    skipped = {name for rule in rules for name in rule.without}
    unsaid = [rule.warned for rule in rules if rule.warned and not any(rule.warned in each for each in said)]
    if unsaid:
        return _verdict("DIFFERS", about=f"no warning says {unsaid[0]!r}")
    parts = errors(found, expected, watched=case["watch"] != "nothing")
    apart = _apart(found.weights, expected.weights)
    wrong = {name: error for name, error in parts.items() if name.split()[0] not in skipped}
    worst = max(wrong, key=lambda name: wrong[name])
    if wrong[worst] > TOLERANCE or not np.isfinite(wrong[worst]):
        numbers = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
        return _verdict("DIFFERS", about=f"{worst} by {wrong[worst]:.1e}", said=numbers, error=wrong[worst])
    about = "; ".join(f"{rule.page}: {rule.says}" for rule in rules)
    return _verdict("by design" if rules else "same", about=about, error=wrong[worst]) | {"apart": apart}


def _expected(case: Case) -> Trained:
    rules = applying(case)
    plain = settled({**case, **{name: value for rule in rules for name, value in rule.reference.items()}})
    # Keras counts otherwise in compiled steps: updates of data of unknown length, and rows in the loss of one output.
    compiled = plain["data"] == "unknown length" or (plain["model"] == "two outputs" and not plain["eager"])
    # Of the components, plain Keras's training has the transform alone.
    ours = {name: values[0] for name, values in AXES.items() if name in COMPONENTS and name != "transform"}
    return _trained(written({**plain, **ours}), compiled, any(rule.summed for rule in rules))


@functools.cache
def _trained(text: str, compiled: bool, summed: bool) -> Trained:
    return Training(read(text), compiled, summed).run()


def errors(found: Trained, expected: Trained, watched: bool = False) -> dict[str, float]:
    """How far each part of what a training shows is off, as a share of what it should be."""
    moved = _distance(expected.weights, expected.start)
    shown = {name: (found.history.get(name, []), each) for name, each in expected.history.items()}
    if not watched:
        # Callbacks of ours show more.
        shown |= {name: (each, []) for name, each in found.history.items() if name not in shown}
    names = expected.evaluate.keys() == found.evaluate.keys()
    evaluated = [_relative([found.evaluate[name]], [each]) for name, each in expected.evaluate.items()] if names else []
    return {
        "start": _distance(found.start, expected.start),
        "updates": float(found.updates != expected.updates),
        "weights": _distance(found.weights, expected.weights) / max(moved, 1e-2),
        **{f"history of {name}": _relative(*each) for name, each in shown.items()},
        "evaluate": max(evaluated, default=float("inf")),
        "predict": _relative(found.predict, expected.predict),
    }


def _distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    if [each.shape for each in one] != [each.shape for each in other]:
        return float("inf")
    return float(np.sqrt(sum(np.square(a - b, dtype="float64").sum() for a, b in zip(one, other, strict=True))))


def _apart(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    largest = max(1.0, *(float(np.abs(each).max()) for each in expected))
    return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True)) / largest


def _relative(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    if found.shape != expected.shape:
        return float("inf")
    return float((np.abs(found - expected) / np.maximum(1.0, np.abs(expected))).max(initial=0.0))


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    """What is logged and warned of meanwhile, known at the end."""
    said: list[str] = []
    logger, handler = logging.getLogger("keras_paragrad"), _Kept(said)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(each.message) for each in caught]
    finally:
        logger.removeHandler(handler)


def is_refusal(error: Exception) -> bool:
    """Whether the package raised an error, as a refusal."""
    frames = _FRAME.findall("".join(traceback.format_exception(error)))
    kind = isinstance(error, (ValueError, RuntimeError, TypeError))
    return kind and bool(frames) and "/keras_paragrad/" in frames[-1]


def _of_error(case: Case, error: Exception) -> dict[str, Any]:
    """A refusal is raised by the package; what plain Keras raises too is no case."""
    said = "".join(traceback.format_exception(error))
    if is_refusal(error):
        return _verdict("refused", about=first_line(error), said=said)
    try:
        Training(settled(case), compiled=True).run()
    except Exception as plain:
        return _verdict("KERAS FAILS", about=first_line(plain), said=said)
    return _verdict("FAILS", about=f"{type(error).__name__}: {first_line(error)}", said=said)


def _verdict(kind: str, about: str = "", said: str = "", error: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "about": about, "said": said, "error": error}


def first_line(error: Exception) -> str:
    """What an error says, without the story of a traced function."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of an error in a traced function, the story comes before what it says.
    last = [line for line in lines if not line.startswith(("File ", "in user code", "raise", "*", "Traceback"))]
    return ((last[-1] if lines and lines[0].startswith("in user code") else lines[0]) if last else "")[:300]


class _Kept(logging.Handler):
    def __init__(self, said: list[str]):
        super().__init__(logging.INFO)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def together(texts: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """The outcomes of cases that are run in one process of their own, for so many seconds at most."""
    from runner import own_process

    return own_process.call(outcomes, texts, [environment()], seconds)[0]


def outside(text: str, seconds: float) -> dict[str, Any]:
    """The outcome of a case that is run in a process of its own, for so many seconds at most."""
    try:
        return together([text], seconds)[0]
    except RuntimeError as error:
        kind = "NO END" if "not done in time" in str(error) else "CRASH"
        return {**_verdict(kind, about=str(error)), "seconds": seconds}


def environment() -> dict[str, str]:
    """Of a process that runs cases."""
    found = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "1"}
    found |= {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0")}
    return found | {"DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION": "0"}
