"""What can't be asked for together with a pipeline."""

from collections.abc import Sequence
from typing import Any

from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.names import canonical_devices
from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.pipeline.pipeline import Pipeline


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
