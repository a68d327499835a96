"""`PipelineParallel`: the stages of one model, each on a device of its own."""

import contextlib
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_paragrad.compat.model import compile_arguments
from keras_paragrad.distribution.decisions.computation import ACROSS
from keras_paragrad.distribution.decisions.decision import Decision, list_of
from keras_paragrad.distribution.decisions.devices import found_here, requested_devices
from keras_paragrad.distribution.decisions.strategy import found_in_words
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Decisions, Options
from keras_paragrad.distribution.parallelism import Parallelism, PlannedRun
from keras_paragrad.distribution.pipeline.checks import check_pipeline, check_place, devices_for, devices_of_stages
from keras_paragrad.distribution.pipeline.pipeline import Pipeline
from keras_paragrad.distribution.pipeline.preparation import PipelinePreparation
from keras_paragrad.distribution.preparation import Preparation


class PipelineParallel(Parallelism):
    """One replica, whose stages are on several devices.

    Args:
        pipeline: How the model is cut.
    """

    precedence = 10
    accepts = (Pipeline,)

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline

    @classmethod
    def asked(cls, options: Options, hardware: Hardware | None) -> "PipelineParallel | None":
        return cls(options.strategy) if isinstance(options.strategy, Pipeline) else None

    @classmethod
    def check_options(cls, options: Options) -> None:
        if isinstance(options.strategy, Pipeline):
            check_pipeline(options, options.strategy)

    def canonical_devices(self, devices: Any) -> tuple[Any, ...]:
        return devices_of_stages(devices)

    def decide(self, hardware: Hardware, options: Options) -> Decisions:
        check_place(self.pipeline, hardware)
        reason = f"requested: {self.pipeline.count} stages, {self.pipeline.microbatches} micro-batches"
        strategy = Decision("strategy", "pipeline", reason, found_in_words(hardware), 'strategy="auto"')
        stages = f"{self.pipeline.count} stages"
        widths = {len(each) for each in options.devices or () if isinstance(each, tuple)}
        if widths:
            range_of = " to ".join(str(each) for each in sorted({min(widths), max(widths)}))
            stages += f" on {range_of} devices each"
        replicas = Decision("replicas", 1, "the stages are one model", stages, 'strategy="mirrored"')
        return Decisions([strategy, self._decide_devices(hardware, options), replicas, _decide_jit(options)], stages)

    def _decide_devices(self, hardware: Hardware, options: Options) -> Decision:
        if options.devices is not None:
            return requested_devices(tuple(name for stage in _stages(options.devices) for name in stage), hardware)
        names = devices_for(self.pipeline, hardware)
        override = f"devices={list_of(names[::-1])}"
        return Decision("devices", names, "one for each stage", found_here(hardware), override)

    def placement(self) -> contextlib.AbstractContextManager[Any]:
        # The model may be larger than any of the devices.
        return tf.device("CPU:0")

    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        options = run.options
        by_xla = options.jit is True or (options.jit == "auto" and compile_arguments(model).get("jit_compile") is True)
        devices = _stages(options.devices or run.plan.devices.value)
        return PipelinePreparation.of(model, self.pipeline, devices, options.weighting, by_xla)

    def estimate(self, model: keras.Model, run: PlannedRun, batch_size: int, length: int | None) -> NoReturn:
        raise ValueError(
            "The estimate knows no pipelines. Estimate the model on one device, with "
            "DistributedFit('none').estimate(model, batch_size), and print(dist.explain()) after "
            "dist.prepare(model): it shows the weights and optimizer state of each stage."
        )


def _stages(devices: Any) -> tuple[tuple[str, ...], ...]:
    """The devices of each stage."""
    return tuple((each,) if isinstance(each, str) else each for each in devices)


def _decide_jit(options: Options) -> Decision:
    if options.jit == "auto":
        reason = "left alone, as not every layer can be compiled apart from others; jit_compile=True in compile() holds"
        return Decision("jit", "none", reason, "recurrent layers and added losses can't", "jit=True")
    value, other = ("per_stage", False) if options.jit else ("none", True)
    return Decision("jit", value, "requested", ACROSS, f"jit={other}")


PARALLELISM = PipelineParallel
