"""`PipelineParallel`: the stages of one model, each on another device."""

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_paragrad.compat.model import compile_arguments
from keras_paragrad.distribution.decisions import devices_argument, requested_devices, splitting_cpu
from keras_paragrad.distribution.hardware import Hardware, canonical_devices
from keras_paragrad.distribution.options import Decision, Decisions, Options
from keras_paragrad.distribution.parallelism import Parallelism, PlannedRun, Preparation
from keras_paragrad.distribution.pipeline.pipeline import Pipeline
from keras_paragrad.distribution.pipeline.preparation import PipelinePreparation
from keras_paragrad.plain_text import counted


class PipelineParallel(Parallelism):
    """One replica, whose stages are on several devices."""

    precedence = 10
    # Of `compat.names.NAMES`.
    parts = ("segments", "memory", "pipelines")
    accepts = (Pipeline,)

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline

    @classmethod
    def asked(cls, options: Options, hardware: Hardware | None) -> "PipelineParallel | None":
        return cls(options.strategy) if isinstance(options.strategy, Pipeline) else None

    @classmethod
    def check_options(cls, options: Options) -> None:
        if not isinstance(options.strategy, Pipeline):
            return
        if options.devices is not None:
            _check_devices(options.devices, options.strategy)
        if not options.exact:
            raise ValueError(
                "exact=False, but a pipeline trains as one device does, or not at all. Leave exact out; for a model "
                "whose batches can't be cut, write Pipeline(..., microbatches=1)."
            )
        if options.shard is not None:
            raise ValueError(
                f"shard={options.shard!r} cuts variables among replicas, and a pipeline has one replica, with a stage "
                'of the model on each device. Leave shard out, or write strategy="mirrored".'
            )

    def canonical_devices(self, devices: Any) -> tuple[Any, ...]:
        """A device for each stage, or a tuple for each."""
        if not isinstance(devices, (list, tuple)) or not any(isinstance(stage, (list, tuple)) for stage in devices):
            return canonical_devices(devices)
        stages = [list(stage) if isinstance(stage, (list, tuple)) else [stage] for stage in devices]
        if not all(stages):
            raise ValueError(
                f"devices={list(devices)} has a stage without a device. Write a list of devices for each stage, as in "
                'devices=[["GPU:0", "GPU:1"], ["GPU:2", "GPU:3"]].'
            )
        names = iter(canonical_devices([name for stage in stages for name in stage]))
        return tuple(tuple(next(names) for _ in stage) for stage in stages)

    def decide(self, hardware: Hardware, options: Options) -> Decisions:
        """This parallelism's own decisions; the functions in `decisions.py` make the others."""
        if hardware.worker_count > 1:
            raise ValueError(
                "A pipeline works within one process, and this one is of a cluster of "
                f'{hardware.worker_count} workers. Start it alone, or write strategy="multi_worker" with '
                'shard="parameters".'
            )
        reason = f"requested: {self.pipeline.count} stages, {counted(self.pipeline.microbatches, 'micro-batch')}"
        strategy = Decision(name="strategy", value="pipeline", reason=reason, override='strategy="auto"')
        stages = f"{self.pipeline.count} stages"
        widths = {len(stage) for stage in options.devices or () if isinstance(stage, tuple)}
        if widths:
            numbers = " to ".join(map(str, sorted({min(widths), max(widths)})))
            stages += f" on {numbers} devices each"
        replicas = Decision(name="replicas", value=1, reason="the stages are one model", override='strategy="mirrored"')
        reason = "requested"
        if options.jit == "auto":
            reason = "recurrent layers and added losses can't be compiled by stages; jit_compile=True in compile holds"
        value, other = ("per_stage", False) if options.jit is True else ("none", True)
        jit = Decision(name="jit", value=value, reason=reason, override=f"jit={other}")
        return Decisions([strategy, self._decide_devices(hardware, options), replicas, jit], counted=stages)

    def _decide_devices(self, hardware: Hardware, options: Options) -> Decision:
        """Decides the stages' devices."""
        if options.devices is not None:
            return requested_devices(tuple(name for stage in _stages(options.devices) for name in stage), hardware)
        count = self.pipeline.count
        names = [device.name for device in hardware.of_kind("GPU") or hardware.of_kind("CPU")]
        if len(names) < count:
            fewer = f" Write Pipeline(stages={len(names)}, ...), or name others." if len(names) > 1 else ""
            raise ValueError(
                f"The pipeline has {count} stages, and this process has only {', '.join(names)}.{fewer} "
                f"{splitting_cpu(count)}"
            )
        chosen = tuple(names[:count])
        override = devices_argument(chosen[::-1])
        return Decision(name="devices", value=chosen, reason="one for each stage", override=override)

    def placement(self) -> contextlib.AbstractContextManager[object]:
        # The model may be larger than any of the devices.
        return tf.device("CPU:0")

    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        options = run.options
        by_xla = options.jit is True or (options.jit == "auto" and compile_arguments(model).get("jit_compile") is True)
        devices = _stages(options.devices or run.plan.devices.value)
        return PipelinePreparation.of(model, self.pipeline, devices, options.weighting, by_xla, options.prove)

    def estimate(self, model: keras.Model, run: PlannedRun, batch_size: int, length: int | None) -> NoReturn:
        raise ValueError(
            "The estimate does not cover pipelines. Estimate the model on one device, with "
            "DistributedFit('none').estimate(model, batch_size), and print(dist.explain()) after "
            "dist.prepare(model): it shows the weights and optimizer state of each stage."
        )


def _stages(devices: Sequence[str | tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The devices of each stage."""
    return tuple((stage,) if isinstance(stage, str) else stage for stage in devices)


def _check_devices(devices: Sequence[str | tuple[str, ...]], pipeline: Pipeline) -> None:
    """Refuses devices for another number of stages, and more in a stage than there are micro-batches."""
    if len(devices) != pipeline.count:
        named = [list(stage) if isinstance(stage, tuple) else stage for stage in devices]
        noun, fix = "devices", "Name one device for each stage, in order."
        if isinstance(devices[0], tuple):
            noun, fix = "lists", "Write a list of devices for each stage, in order."
            if all(len(stage) == pipeline.count for stage in devices):
                transposed = [list(stage) for stage in zip(*devices, strict=True)]
                fix = f"Each list holds the devices of one stage, not of one replica: devices={transposed}."
        raise ValueError(
            f"devices={named} has {len(devices)} {noun}, and the pipeline has {pipeline.count} stages. {fix}"
        )
    widest = max((stage for stage in devices if isinstance(stage, tuple)), key=len, default=())
    if len(widest) > pipeline.microbatches:
        raise ValueError(
            f"A stage has {len(widest)} devices, {list(widest)}, which take turns at micro-batches, and there are "
            f"{pipeline.microbatches} of them: some would have nothing to do. Write Pipeline(..., "
            f"microbatches={4 * len(widest)}), or name fewer devices."
        )


PARALLELISM = PipelineParallel
