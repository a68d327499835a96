"""Every argument of everything public, with values of every kind: right ones are taken, others refused by name."""

import decimal
import fractions
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_paragrad
from keras_paragrad.distribution import Pipeline, with_one_writer
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.data import distributed_dataset
from keras_paragrad.distribution.options import Options
from keras_paragrad.per_example import register_rule

HERE = str(Path(keras_paragrad.__file__).parent)
VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "np.True_": np.True_,
    "0": 0,
    "np.zeros(())": np.zeros((), "int64"),
    "1": 1,
    "np.int8(3)": np.int8(3),
    "np.array(3)": np.array(3),
    "tf.constant(3)": tf.constant(3),
    "-1": -1,
    "2**40": 2**40,
    "2**63": 2**63,
    "2**70": 2**70,
    "-2**70": -(2**70),
    "10**6000": 10**6000,
    "0.5": 0.5,
    "np.float32(0.5)": np.float32(0.5),
    "1/2": fractions.Fraction(1, 2),
    "decimal": decimal.Decimal("0.5"),
    "1.5": 1.5,
    "-0.5": -0.5,
    "1e300": 1e300,
    "nan": float("nan"),
    "np.nan": np.float64("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "1j": 1j,
    "'1'": "1",
    "''": "",
    "' '": " ",
    "'word'": "word",
    "'auto'": "auto",
    "'AUTO'": "AUTO",
    "np.str_": np.str_("word"),
    "'a\\0b'": "a\0b",
    "surrogate": "\ud800",
    "long text": "x" * 100_000,
    "gs://": "gs://bucket/x",
    "b'auto'": b"auto",
    "[]": [],
    "()": (),
    "[1]": [1],
    "[nan]": [float("nan")],
    "[0.5]": [0.5],
    "['word']": ["word"],
    "[None]": [None],
    "nested": [[[[[]]]]],
    "{}": {},
    "{0: 1.0}": {0: 1.0},
    "{'a': 1}": {"a": 1},
    "{0: 'x'}": {0: "x"},
    "{0: nan}": {0: float("nan")},
    "{mixed}": {0: 1, "a": 2},
    "set": {1, 2},
    "range": range(2**60),
    "iterator": iter([]),
    "object": object(),
    "class": int,
    "module": np,
    "...": ...,
    "function": lambda *words: words,
    "method": "word".join,
    "array": np.ones(2),
    "empty array": np.ones((0, 2)),
    "strings": np.array(["a", "b"]),
    "objects": np.array([object()]),
    "exception": ValueError("x"),
    "dtype": np.dtype("float32"),
}


def taken(*names: str) -> frozenset[str]:
    assert not set(names) - set(VALUES), set(names) - set(VALUES)
    return frozenset(names)


NONE = taken("None")
FLAG = taken("True", "False", "np.True_")
COUNT = taken("1", "np.int8(3)", "np.array(3)", "tf.constant(3)")
LARGE = taken("2**40")
ZERO = taken("0", "np.zeros(())")
HALF = taken("0.5", "np.float32(0.5)", "1/2", "decimal")
ABOVE_0 = COUNT | LARGE | HALF | taken("1.5", "1e300", "2**63", "2**70")
PATH = taken("'1'", "'word'", "'auto'", "'AUTO'", "np.str_")
AUTO = taken("'auto'")
TEXT = PATH | taken("'a\\0b'", "surrogate", "long text", "gs://")
FUNCTION = taken("function", "method")
WEIGHTING = AUTO | taken("function")
NOTHING = taken()
# What is checked elsewhere: data, which Keras reads, and keywords that are passed on.
ELSEWHERE = None


class Called(NamedTuple):
    """Something public.

    Attributes:
        call: It.
        kinds: For each of its arguments, the names of the `VALUES` it takes; `ELSEWHERE` is not tried.
        base: Arguments that are always given.
        costs: Whether a right call takes long, so that only wrong ones are made.
    """

    call: Callable[..., Any]
    kinds: dict[str, frozenset[str] | None]
    base: dict[str, Any] = {}
    costs: bool = False


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def deep_model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(1) for _ in range(5))])


def fit(**arguments: Any) -> Any:
    return keras_paragrad.DistributedFit("none").fit(**arguments)


@functools.wraps(keras_paragrad.microbatch)
def sliced(**arguments: Any) -> None:
    keras_paragrad.microbatch(**arguments).undo()


def callbacks(**arguments: Any) -> Any:
    return keras_paragrad.DistributedFit("none").callbacks(**arguments)


ROWS = np.ones((4, 2), "float32")
TARGETS = np.ones((4, 1), "float32")
DERIVATIVE = {
    "model": NOTHING,
    "x": ELSEWHERE,
    "output": NONE | ZERO | FUNCTION | taken("-1"),
    "batch_size": COUNT | NONE,
    "wrt": NONE | ZERO,
    "jit_compile": FLAG | AUTO,
    "stream": FLAG,
    "verbose": FLAG | ZERO | taken("1"),
}
BASELINE = NONE | COUNT | ZERO | LARGE | HALF - taken("1/2", "decimal")
BASELINE |= taken("-1", "2**63", "1.5", "-0.5", "[1]", "[0.5]", "array", "{0: 1.0}", "{'a': 1}")
OPTIONS = {
    "strategy": AUTO,
    "devices": NONE,
    "jit": FLAG | AUTO,
    "exact": FLAG,
    "prove": FLAG,
    "deterministic": FLAG | (COUNT - taken("1")),
    "weighting": WEIGHTING,
    "shard_policy": NOTHING,
    "shard": NONE,
    "min_shard_bytes": COUNT | LARGE,
    "fit_memory": FLAG,
    # Only with fit_memory is there anything to decide.
    "device_bytes": NONE,
    # Its axes have names of their own, and a layout needs it.
    "mesh": NONE,
    "layout": NONE,
    "startup_timeout": COUNT | taken("1.5"),
}
PUBLIC = {
    "AccumulatingOptimizer": Called(
        keras_paragrad.AccumulatingOptimizer,
        {
            "inner_optimizer": NOTHING,
            "steps": COUNT | LARGE,
            "weighting": WEIGHTING,
            "tail": NOTHING,
            "accumulator_dtype": NONE,
            "skip_nonfinite": FLAG,
            "name": ELSEWHERE,
        },
        {"inner_optimizer": "sgd"},
    ),
    "Backup": Called(
        Backup,
        {
            "directory": PATH,
            "every": COUNT | LARGE,
            "keep": COUNT | LARGE,
            "on_sigterm": FLAG,
            "callbacks": taken("[]", "()", "empty array"),
            "delete_when_done": FLAG,
        },
        {"directory": "backups"},
    ),
    "DistributedFit": Called(keras_paragrad.DistributedFit, OPTIONS, {"strategy": "none"}, costs=True),
    "DistributedFit.callbacks": Called(
        callbacks,
        {
            "directory": PATH,
            "every": COUNT | LARGE,
            "keep": COUNT | LARGE,
            "on_sigterm": FLAG,
            "delete_when_done": FLAG,
        },
        {"directory": "backups"},
    ),
    "DistributedFit.fit": Called(
        fit,
        {
            "model": NOTHING,
            "x": ELSEWHERE,
            "y": ELSEWHERE,
            "batch_size": COUNT | LARGE | NONE,
            "epochs": COUNT | LARGE | ZERO,
            "verbose": ELSEWHERE,
            "callbacks": NONE | taken("[]", "()", "empty array"),
            "validation_split": HALF | ZERO,
            "validation_data": ELSEWHERE,
            "shuffle": FLAG,
            "class_weight": NONE | taken("{0: 1.0}"),
            "sample_weight": ELSEWHERE,
            "initial_epoch": ZERO | COUNT | LARGE,
            "steps_per_epoch": COUNT | LARGE | NONE,
            "validation_steps": COUNT | LARGE | NONE,
            "validation_batch_size": COUNT | LARGE | NONE,
            "validation_freq": COUNT | LARGE | taken("[1]", "set", "[]", "()"),
            "prefetch": ELSEWHERE,
            "seed": ELSEWHERE,
        },
        {"model": model, "x": ROWS, "y": TARGETS},
        costs=True,
    ),
    "AdaptiveClip": Called(
        keras_paragrad.AdaptiveClip,
        {"quantile": HALF, "initial": ABOVE_0, "learning_rate": ABOVE_0, "count_noise": ABOVE_0 | NONE},
    ),
    "ExactAccumulation": Called(
        keras_paragrad.ExactAccumulation,
        {
            "steps": COUNT | LARGE | NONE,
            "prove": FLAG,
            "callbacks": taken("[]", "()", "empty array"),
            "weighting": WEIGHTING,
            "tail": NOTHING,
            "accumulator_dtype": NONE,
            "skip_nonfinite": FLAG,
        },
        {"steps": 2},
    ),
    "estimate_memory": Called(
        keras_paragrad.estimate_memory,
        {
            "model": NOTHING,
            "batch_size": COUNT | LARGE,
            "replicas": COUNT | LARGE,
            "length": COUNT | LARGE | NONE,
            "optimizer": ELSEWHERE,
            "min_shard_bytes": COUNT | LARGE,
            "batch_spec": ELSEWHERE,
            "device_bytes": COUNT | LARGE | NONE,
        },
        {"model": model, "batch_size": 4},
        costs=True,
    ),
    "fix_batch_norm": Called(keras_paragrad.fix_batch_norm, {"model": NOTHING}),
    "make_private": Called(
        keras_paragrad.make_private,
        {
            "model": NOTHING,
            "clip_norm": ABOVE_0 | taken("{'a': 1}"),
            "expected_batch_size": COUNT,
            "delta": NOTHING,
            "target_epsilon": NONE,
            "epochs": NONE,
            "noise_multiplier": ABOVE_0,
            "examples": COUNT | LARGE | NONE,
            "physical_batch_size": COUNT | LARGE | NONE,
            "accountant": NOTHING,
            "secure_noise": FLAG,
            "seed": ZERO | COUNT | LARGE | NONE | taken("2**63"),
        },
        {
            "model": model,
            "clip_norm": 1.0,
            "expected_batch_size": 1,
            "delta": 1e-20,
            "noise_multiplier": 1.0,
            "examples": 100,
        },
    ),
    "ExampleGradients": Called(
        keras_paragrad.ExampleGradients,
        {
            "layer": NONE,
            "quantiles": taken("[]", "()", "[1]", "[0.5]", "array", "empty array"),
            "bins": COUNT,
            "largest": COUNT | LARGE,
        },
    ),
    "GradientNoiseScale": Called(
        keras_paragrad.GradientNoiseScale,
        {"source": AUTO, "decay": HALF | ZERO, "update_freq": COUNT | LARGE},
    ),
    "GradientTelemetry": Called(
        keras_paragrad.GradientTelemetry,
        {
            "log_dir": PATH | NONE,
            "every": COUNT | LARGE,
            "vanishing": HALF | ZERO,
            "exploding": ABOVE_0 - HALF - taken("1") | taken("inf"),
            "patience": COUNT | LARGE,
        },
    ),
    "Options": Called(Options, OPTIONS),
    "PerExampleGradients": Called(
        keras_paragrad.PerExampleGradients,
        {
            "layer": NOTHING,
            "quantity": NOTHING,
            "clip_norm": ABOVE_0 | taken("inf") | NONE,
            "transform": FUNCTION | NONE,
            "capacity": COUNT | NONE,
            "loss_reduction": NONE,
            "kwargs": ELSEWHERE,
        },
        {"layer": lambda: keras.layers.Dense(1)},
    ),
    "ProfileSchedule": Called(
        keras_paragrad.ProfileSchedule,
        {
            "skip_first": ZERO | COUNT | LARGE,
            "wait": ZERO | COUNT | LARGE,
            "warmup": ZERO | COUNT | LARGE,
            "active": COUNT,
            "repeat": COUNT | LARGE | NONE,
        },
    ),
    "Profiler": Called(
        keras_paragrad.Profiler,
        {
            "log_dir": PATH,
            "schedule": NONE,
            "summary": FLAG,
            "report": NONE | taken("False"),
        },
        {"log_dir": "logs"},
    ),
    "Throughput": Called(
        keras_paragrad.Throughput,
        {
            "log_dir": PATH | NONE,
            "interval": ABOVE_0,
            "peak_flops": ABOVE_0 | NONE,
            "flops": FLAG | NONE,
            "batch_size": COUNT | LARGE | NONE,
        },
    ),
    "distributed_dataset": Called(
        distributed_dataset,
        {
            "strategy": NOTHING,
            "x": ELSEWHERE,
            "y": ELSEWHERE,
            "sample_weight": ELSEWHERE,
            "batch_size": COUNT | LARGE | NONE,
            "shuffle": FLAG,
            "class_weight": NONE | taken("{0: 1.0}"),
            "steps_per_epoch": COUNT | LARGE | NONE,
            "shard_policy": NOTHING,
            "prefetch": FLAG | COUNT | LARGE,
            "seed": ZERO | COUNT | LARGE | NONE,
            "parts": COUNT | LARGE | NONE,
        },
        {"strategy": tf.distribute.get_strategy(), "x": ROWS, "y": TARGETS},
        costs=True,
    ),
    "hessian_vector_product": Called(
        keras_paragrad.hessian_vector_product,
        {**DERIVATIVE, "vector": ELSEWHERE},
        {"model": model, "x": ROWS, "vector": ROWS},
        costs=True,
    ),
    "input_gradients": Called(keras_paragrad.input_gradients, DERIVATIVE, {"model": model, "x": ROWS}, costs=True),
    "input_jacobian": Called(
        keras_paragrad.input_jacobian, {**DERIVATIVE, "mode": AUTO}, {"model": model, "x": ROWS}, costs=True
    ),
    "integrated_gradients": Called(
        keras_paragrad.integrated_gradients,
        {**DERIVATIVE, "steps": COUNT, "baseline": BASELINE},
        {"model": model, "x": ROWS},
        costs=True,
    ),
    "transform_gradients": Called(
        keras_paragrad.transform_gradients,
        {"model": NOTHING, "f": NOTHING},
        {"model": model, "f": lambda: lambda given, _: given},
    ),
    "find_batch_size": Called(
        keras_paragrad.find_batch_size,
        {
            "model": NOTHING,
            "x": ELSEWHERE,
            "y": ELSEWHERE,
            "device_bytes": COUNT | LARGE | NONE,
            "max_batch_size": COUNT | NONE,
            "steps": COUNT | ZERO,
            "verbose": FLAG | ZERO | taken("1"),
        },
        {"model": model, "x": ROWS, "y": TARGETS},
        costs=True,
    ),
    "microbatch": Called(
        sliced,
        {
            "model": NOTHING,
            "size": COUNT,
            "weighting": WEIGHTING,
            "prove": FLAG,
            "deterministic": FLAG | (COUNT - taken("1")),
        },
        {"model": model, "size": 4},
    ),
    "Pipeline": Called(
        Pipeline,
        {"stages": COUNT - taken("1"), "cuts": NONE, "microbatches": COUNT},
        {"stages": 2},
    ),
    "recompute": Called(
        lambda model, layers="auto", every=None: keras_paragrad.recompute(model, layers, every=every).undo(),
        {"model": NOTHING, "layers": AUTO, "every": COUNT | NONE},
        {"model": deep_model},
    ),
    "register_rule": Called(lambda layers: register_rule(layers), {"layers": NOTHING}),
    "with_one_writer": Called(
        with_one_writer,
        {"callbacks": taken("[]", "()", "empty array"), "is_chief": FLAG},
        {"callbacks": [], "is_chief": True},
    ),
    "wrap": Called(
        keras_paragrad.wrap,
        {
            "model": NOTHING,
            # Those of `PerExampleGradients`.
            **dict.fromkeys(("quantity", "clip_norm", "transform", "capacity", "loss_reduction"), ELSEWHERE),
        },
        {"model": model},
    ),
    "write_report": Called(
        keras_paragrad.write_report,
        {"log_dir": PATH, "output": PATH | NONE},
        {"log_dir": "missing"},
        costs=True,
    ),
    **{
        name: Called(
            getattr(keras_paragrad, name),
            {
                "model": NOTHING,
                "x": ELSEWHERE,
                "y": ELSEWHERE,
                "loss": FUNCTION,
                "sample_weight": ELSEWHERE,
                "batch_size": COUNT | LARGE | NONE,
                "training": FLAG,
                "jit_compile": FLAG,
            },
            {"model": model, "x": ROWS, "y": TARGETS, "loss": "mse"},
            costs=True,
        )
        for name in ("per_example_gradients", "per_example_norms")
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_value_for_every_argument(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called = PUBLIC[name]
    failures = []
    base = {key: value() if callable(value) else value for key, value in called.base.items()}
    for argument, right in called.kinds.items():
        for label, value in VALUES.items() if right is not None else ():
            if label in right and called.costs:
                continue
            verdict = said_of(called.call, {**base, argument: value}, argument)
            if (verdict is None) != (label in right):
                failures.append(f"{argument}={label}: {verdict or 'taken'}")
            elif verdict and verdict != "refused":
                failures.append(f"{argument}={label}: {verdict}")
    assert not failures, "\n".join(failures)


def said_of(call: Callable[..., Any], arguments: dict[str, Any], argument: str) -> str | None:
    """`None` if the arguments are taken, "refused" if one is in the right way, else what was wrong with that."""
    try:
        call(**arguments)
    except (ValueError, TypeError) as error:
        at = error.__traceback__
        while at and at.tb_next:
            at = at.tb_next
        where = at.tb_frame.f_code.co_filename if at else ""
        text = str(error)
        if not where.startswith(HERE):
            return f"not of ours: {type(error).__name__} from {where}: {text[:200]}"
        if not (f"`{argument}" in text or text.startswith(f"{argument}=")) or len(text) > 1000:
            return f"says {text[:300]}"
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def test_nothing_public_is_left_out():
    assert set(keras_paragrad.__all__) <= set(PUBLIC)
    for name, called in PUBLIC.items():
        function = getattr(keras_paragrad.DistributedFit, name.partition(".")[2], called.call)
        parameters = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        assert set(parameters) == set(called.kinds), name
