"""`PipelineParallel`: the stages of one model, each on a device of its own."""

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_paragrad.compat.model import compile_arguments
from keras_paragrad.distribution.decisions.computation import ACROSS
from keras_paragrad.distribution.decisions.decision import Decision, list_of
from keras_paragrad.distribution.decisions.devices import found_here, requested_devices
from keras_paragrad.distribution.decisions.strategy import found_in_words
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.names import canonical_devices
from keras_paragrad.distribution.options import Decisions, Options
from keras_paragrad.distribution.parallelism import Parallelism, PlannedRun
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


def devices_of_stages(devices: Any) -> Any:
    """What is passed as `devices` for a pipeline, in canonical form: a list for each stage where one has several."""
    if not isinstance(devices, (list, tuple)) or not any(isinstance(each, (list, tuple)) for each in devices):
        return canonical_devices(devices)
    stages = [list(each) if isinstance(each, (list, tuple)) else [each] for each in devices]
    if not all(stages):
        raise ValueError(
            f"devices={list(devices)} has a stage without a device. Write a list of devices for each stage, as in "
            'devices=[["GPU:0", "GPU:1"], ["GPU:2", "GPU:3"]].'
        )
    names = iter(canonical_devices([name for stage in stages for name in stage]))
    return tuple(tuple(next(names) for _ in stage) for stage in stages)


def check_pipeline(options: Options, pipeline: Pipeline) -> None:
    """Refuses options that contradict a pipeline."""
    if options.devices is not None:
        _check_devices(options.devices, pipeline)
    if not options.exact:
        raise ValueError(
            "exact=False, but a pipeline trains as one device does, or not at all. Leave exact out; for a model whose "
            "batches can't be cut, write Pipeline(..., microbatches=1)."
        )
    if options.shard is not None:
        raise ValueError(
            f"shard={options.shard!r} cuts variables among replicas, and a pipeline has one replica, with a stage of "
            'the model on each device. Leave shard out, or write strategy="mirrored".'
        )
    given = {"communication": options.communication, "pack_bytes": options.pack_bytes}
    given["collective_timeout"] = options.collective_timeout
    unused = [name for name, value in given.items() if value not in (None, "auto")]
    if unused or options.batch == "per_replica":
        listed = ", ".join([*unused, *(["batch"] if options.batch == "per_replica" else [])])
        raise ValueError(f"{listed} has no effect in a pipeline, which has one replica. Leave it out.")


def _check_devices(devices: Sequence[Any], pipeline: Pipeline) -> None:
    if len(devices) != pipeline.count:
        named = [list(each) if isinstance(each, tuple) else each for each in devices]
        what, instead = "devices", "Name one device for each stage, in order."
        if isinstance(devices[0], tuple):
            what, instead = "lists", "Write a list of devices for each stage, in order."
            if all(len(each) == pipeline.count for each in devices):
                turned = [list(each) for each in zip(*devices, strict=True)]
                instead = f"Each list holds the devices of one stage, not those of one replica: devices={turned}."
        raise ValueError(
            f"devices={named} has {len(devices)} {what}, and the pipeline has {pipeline.count} stages. {instead}"
        )
    widest = max((each for each in devices if isinstance(each, tuple)), key=len, default=())
    if len(widest) > pipeline.microbatches:
        raise ValueError(
            f"A stage has {len(widest)} devices, {list(widest)}, which take turns at micro-batches, and there are "
            f"{pipeline.microbatches} of them: some would have nothing to do. Write Pipeline(..., "
            f"microbatches={4 * len(widest)}), or name fewer devices."
        )


def check_place(pipeline: Pipeline, hardware: Hardware) -> None:
    """Refuses a pipeline where there are several processes, or too few devices."""
    if hardware.worker_count > 1:
        raise ValueError(
            f"A pipeline works within one process, and this one is of a cluster of {hardware.worker_count} workers. "
            'Start it alone, or write strategy="multi_worker" with shard="parameters".'
        )


def devices_for(pipeline: Pipeline, hardware: Hardware) -> tuple[str, ...]:
    """The devices of the stages, if none are named: the GPUs, or else logical devices of the CPU."""
    found = [device.name for device in hardware.of_kind("GPU") or hardware.of_kind("CPU")]
    if len(found) < pipeline.count:
        raise ValueError(
            f"The pipeline has {pipeline.count} stages, and there are only {', '.join(found)}. Write "
            f"Pipeline(stages={len(found)}, ...), or split the CPU into logical devices first: "
            'tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], '
            f"[tf.config.LogicalDeviceConfiguration()] * {pipeline.count})."
            if len(found) > 1
            else f"The pipeline has {pipeline.count} stages, and there is only {', '.join(found)}. To try it on a CPU, "
            "split that into logical devices first: tf.config.set_logical_device_configuration("
            'tf.config.list_physical_devices("CPU")[0], '
            f"[tf.config.LogicalDeviceConfiguration()] * {pipeline.count})."
        )
    return tuple(found[: pipeline.count])
