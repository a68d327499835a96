"""A pytest plugin that puts a component under every model that Keras's own tests compile, or into every `fit`.

The environment says which, in `UNDER_EVERY_MODEL`: one of `keras_suite.expected.COMPONENTS`, or "nothing", which writes
the names of the tests that fail without us to the file `UNDER_EVERY_MODEL_FAILS`. Those are left out then.

A test that is expected to be refused has to be, in the words of `keras_suite.expected`.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.testing import TestCase
from keras.src.trainers import trainer as trainers
from keras_suite.expected import expected
from tensorflow.python.distribute.values import DistributedVariable

from keras_paragrad import DistributedFit, GradientTelemetry, Profiler, ProfileSchedule, Throughput, microbatch
from keras_paragrad.compat.check import check_internals

COMPONENT = os.environ["UNDER_EVERY_MODEL"]
FAILS = Path(os.environ["UNDER_EVERY_MODEL_FAILS"])
# More examples than any batch has.
WHOLE = 10**6

# Keras's tests import JAX on every backend, and use it on its own alone; of Keras's `conftest`, one asks for this.
sys.modules.setdefault("jax", types.ModuleType("jax"))
sys.modules["conftest"] = mock.Mock(skip_if_backend=lambda backend, reason: lambda test: test)

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

failed: list[str] = []


def after_compile(put_under: Callable[[Any], None]) -> None:
    compile_ = Trainer.compile

    @functools.wraps(compile_)
    def compile_and_put_under(self: Any, *arguments: Any, **keywords: Any) -> None:
        compile_(self, *arguments, **keywords)
        put_under(self)

    Trainer.compile = compile_and_put_under


def in_slices(model: Any) -> None:
    # Keras's tests train layers with a trainer mixed in, which are no models; all that is needed of them is there.
    with mock.patch("keras_paragrad.accumulation.slices.check_instance"):
        microbatch(model, WHOLE)


def prepared_by(dist: DistributedFit) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        before = model.__dict__.pop("_under_every_model", None)
        if before is not None:
            before.undo()
        # Some of Keras's tests make a strategy of their own.
        strategy = model.distribute_strategy
        others = strategy is not dist.strategy and strategy.num_replicas_in_sync > 1
        model.__dict__["_under_every_model"] = (DistributedFit(strategy) if others else dist).prepare(model)

    return prepare


def on_two_replicas() -> None:
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    after_compile(prepared_by(dist))
    around_every_test(dist.scope)
    # Keras's tests give NumPy and int() what mirrored variables only have in `numpy()`.
    DistributedVariable.__int__ = lambda variable: int(variable.numpy())
    DistributedVariable.__array__ = lambda variable, dtype=None, copy=None: np.array(variable.numpy(), dtype)


def around_every_test(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Around a test and its class's `setUp`, after Keras has made a new default graph: a strategy's scope is of one."""
    set_up = TestCase.setUp

    @functools.wraps(set_up)
    def set_up_within(self: Any) -> None:
        set_up(self)
        # Some draw sparse matrices, whose order decides whether they can be divided.
        keras.utils.set_random_seed(0)
        self.enterContext(context())

    TestCase.setUp = set_up_within


# The names of Keras 3.15, and of later releases.
KerasTrainer = getattr(tensorflow_trainer, "TensorFlowTrainer", None) or tensorflow_trainer.Trainer
Trainer = getattr(trainers, "Trainer", None) or trainers.BaseTrainer


def with_callbacks() -> None:
    fit = KerasTrainer.fit

    @functools.wraps(fit)
    def fit_with_callbacks(self: Any, *arguments: Any, callbacks: Any = None, **keywords: Any) -> Any:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return fit(self, *arguments, callbacks=callbacks, **keywords)
        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
        schedule = ProfileSchedule(skip_first=1, wait=0, warmup=0, active=1, repeat=1)
        with tempfile.TemporaryDirectory() as folder:
            profiler = Profiler(folder, schedule, summary=False, report=None)
            ours = [GradientTelemetry(folder), Throughput(folder), profiler]
            return fit(self, *arguments, callbacks=[*given, *ours], **keywords)

    KerasTrainer.fit = fit_with_callbacks


# It compiles a model, once in a process, which is to have no component under it.
check_internals("models", "steps")
around_every_test(contextlib.nullcontext)
{
    "nothing": lambda: None,
    "microbatch": lambda: after_compile(in_slices),
    "one replica": lambda: after_compile(prepared_by(DistributedFit("none"))),
    "two replicas": on_two_replicas,
    "callbacks": with_callbacks,
}[COMPONENT]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fails = json.loads(FAILS.read_text()) if COMPONENT != "nothing" and FAILS.exists() else []
    items[:] = [item for item in items if item.nodeid not in fails]
    for item in items:
        if reason := expected(COMPONENT, item.name):
            item.add_marker(pytest.mark.xfail(reason=reason.what, strict=True))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    reason = expected(COMPONENT, item.name)
    error = call.excinfo and f"{call.excinfo.typename}: {call.excinfo.value}"
    if hasattr(report, "wasxfail") and report.skipped and reason and reason.words not in error:
        # It has failed, and by something else.
        report.outcome = "failed"
        del report.wasxfail
    if report.failed:
        failed.append(item.nodeid)
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if COMPONENT == "nothing":
        FAILS.write_text(json.dumps(failed))
        session.exitstatus = 0
