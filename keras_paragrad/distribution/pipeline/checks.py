"""What can't be asked for together with a pipeline."""

from typing import TYPE_CHECKING, Any

from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from keras_paragrad.distribution.options import Options


def check_one_device_a_stage(devices: Any) -> None:
    """Refuses several devices for a stage.

    Raises:
        ValueError: The message says what to write.
    """
    if isinstance(devices, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in devices):
        raise ValueError(
            f"devices={list(devices)} has several devices for a stage, and a pipeline is not combined with data "
            'parallelism. Name one for each stage, as in devices=["GPU:0", "GPU:1"]. For replicas of a model that is '
            'larger than a device, write DistributedFit("mirrored", shard="parameters").'
        )


def check_pipeline(options: "Options", pipeline: Pipeline) -> None:
    """Refuses options that contradict a pipeline.

    Raises:
        ValueError: The message says what to write.
    """
    if options.devices is not None and len(options.devices) != pipeline.count:
        raise ValueError(
            f"devices={list(options.devices)} names {len(options.devices)}, and the pipeline has {pipeline.count} "
            "stages. Name one device for each stage, in order."
        )
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


def check_place(pipeline: Pipeline, hardware: Hardware) -> None:
    """Refuses a pipeline where there are several processes, or too few devices.

    Raises:
        ValueError: The message says what to write.
    """
    if hardware.worker_count > 1:
        raise ValueError(
            f"A pipeline works within one process, and this one is of a cluster of {hardware.worker_count} workers. "
            'Start it alone, or write strategy="multi_worker" with shard="parameters".'
        )


def devices_for(pipeline: Pipeline, hardware: Hardware) -> tuple[str, ...]:
    """The devices of the stages, if none are named: the GPUs, or else logical devices of the CPU.

    Raises:
        ValueError: There are fewer than stages.
    """
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
