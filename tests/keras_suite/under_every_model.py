"""A pytest plugin that puts a component under every model that Keras's own tests compile, or into every `fit`.

Which one is in the environment variable `UNDER_EVERY_MODEL`: `microbatch`, `distributed` or `callbacks`.
"""

import functools
import os
import sys
import tempfile
import types
from typing import Any
from unittest import mock

import keras
from keras.src.trainers.trainer import Trainer

from keras_paragrad import DistributedFit, GradientTelemetry, Profiler, ProfileSchedule, Throughput, microbatch

# Keras's tests import it on every backend, and use it on JAX's alone.
sys.modules.setdefault("jax", types.ModuleType("jax"))
# More examples than any batch has.
WHOLE = 10**6


def _compiled_with(put_under):
    def patched(compile_):
        @functools.wraps(compile_)
        def compile_and_put_under(self, *arguments, **keywords):
            compile_(self, *arguments, **keywords)
            put_under(self)

        return compile_and_put_under

    Trainer.compile = patched(Trainer.compile)


def _sliced(model: Any) -> None:
    # Keras trains layers that are no models here; all that is needed of them is there.
    with mock.patch("keras_paragrad.accumulation.microbatch.check_instance"):
        microbatch(model, WHOLE)


def _prepared(model: Any) -> None:
    before = model.__dict__.get("_under_every_model")
    if before is not None:
        before.undo()
    model.__dict__["_under_every_model"] = DistributedFit("none").prepare(model)


def _fitted_with_callbacks() -> None:
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    fit = TensorFlowTrainer.fit

    @functools.wraps(fit)
    def with_callbacks(self, *arguments, callbacks: Any = None, **keywords):
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return fit(self, *arguments, callbacks=callbacks, **keywords)
        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
        schedule = ProfileSchedule(skip_first=1, wait=0, warmup=0, active=1, repeat=1)
        with tempfile.TemporaryDirectory() as folder:
            ours = [GradientTelemetry(), Throughput(), Profiler(folder, schedule, summary=False)]
            return fit(self, *arguments, callbacks=[*given, *ours], **keywords)

    TensorFlowTrainer.fit = with_callbacks


{
    "microbatch": lambda: _compiled_with(_sliced),
    "distributed": lambda: _compiled_with(_prepared),
    "callbacks": _fitted_with_callbacks,
    "nothing": lambda: None,
}[os.environ["UNDER_EVERY_MODEL"]]()
