"""`shard="auto"`: nothing is held in shards while a step fits the devices, else the cheapest that fits."""

import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.distribution.decisions.decision import Decision
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.workers import gather
from keras_paragrad.memory.estimate import estimate_memory
from keras_paragrad.memory.estimated import Estimate, bytes_in_words
from keras_paragrad.storage.creation import add_copies, create_in_shards, create_whole, unshard

_log = logging.getLogger("keras_paragrad")
# Of a device's memory. The rest is for the error of an estimate, and for what TensorFlow and the data take.
_SHARE = 0.8


def settle_shard(
    model: keras.Model,
    batch_size: int,
    batch_spec: Any,
    strategy: tf.distribute.Strategy,
    plan: Plan,
    hardware: Hardware,
    options: Options,
) -> tuple[Decision, Estimate]:
    """Chooses what is held in shards, and holds a model that was built in shards accordingly; on every worker.

    Args:
        model: The model, compiled and built.
        batch_size: Examples in a batch.
        batch_spec: The `tf.TypeSpec` of batches, or `None` if it has to be derived from the model.
        strategy: The strategy that creates variables in shards.
        plan: The plan.
        hardware: The hardware.
        options: The options.

    Returns:
        The decision, and the estimate that it was made by.

    Raises:
        ValueError: The model isn't built, its step can't be traced, or the devices' memory is unknown.
    """
    device_bytes, least = memory_of_devices(hardware, plan, options), options.min_shard_bytes
    if not model.built:
        raise ValueError(
            f'shard="auto" estimates the memory of a step, and {model.name!r} has no weights yet. Build it within '
            "`with dist.scope():`, by calling it on a batch or with model.build(input_shape)."
        )
    per_replica = plan.batch.value == "per_replica"
    replicas = strategy.num_replicas_in_sync
    estimate = estimate_memory(
        model, batch_size, replicas, per_replica=per_replica, min_shard_bytes=least, batch_spec=batch_spec
    )
    totals = {column.shard: column.total for column in estimate.columns if not column.recompute}
    # The chief's, as the workers must choose the same.
    asked = gather(strategy, np.array([device_bytes, *totals.values()], np.int64))
    device_bytes, totals = int(asked[:, 0].min()), dict(zip(totals, asked[0, 1:].tolist(), strict=True))
    shard = next((each for each, total in totals.items() if total <= _SHARE * device_bytes), "parameters")
    reason = ", ".join(f"{_in_words(each)} {bytes_in_words(total)}" for each, total in totals.items())
    evidence = f"{bytes_in_words(device_bytes)} per device, of which a step may take {_SHARE:.0%}"
    overrides = [f"shard={other!r}" for other in totals if other != shard]
    if totals[shard] > _SHARE * device_bytes:
        mesh = _mesh_on(plan, hardware)
        evidence += "; neither whole variables nor shards fit"
        overrides += [mesh] if mesh else []
        _log.warning(
            "A step of %s is estimated to take %s per device with shard='parameters', of %s. It may run out of memory: "
            "use a smaller batch, microbatch(model, ...), recompute(model)%s, or more devices.",
            *(model.name, bytes_in_words(totals[shard]), bytes_in_words(device_bytes)),
            f", DistributedFit({mesh}), with which a device never holds a divided layer whole" if mesh else "",
        )
    _hold(model, strategy, shard, least)
    return Decision(
        "shard", shard or "none", f"estimated for a step: {reason}", evidence, " or ".join(overrides)
    ), estimate


def memory_of_devices(hardware: Hardware, plan: Plan, options: Options) -> int:
    """The memory of the smallest device, in bytes; logical CPU devices share the machine's.

    Raises:
        ValueError: It is unknown.
    """
    if options.device_bytes is not None:
        return options.device_bytes
    devices = hardware.of_kind("GPU") or hardware.of_kind("CPU")
    used = [device for device in devices if device.name in plan.devices.value or not plan.devices.value]
    unknown = [device.name for device in used if device.memory_bytes is None]
    if unknown or not used:
        raise ValueError(
            f'shard="auto" needs the memory of {", ".join(unknown) or "the devices"}, which is unknown here. Write '
            'DistributedFit(..., shard="auto", device_bytes=16 * 2**30), for instance, or choose shard=None, '
            '"optimizer" or "parameters".'
        )
    sizes = [device.memory_bytes // (len(used) if device.kind == "CPU" else 1) for device in used]  # pyright: ignore
    return min(sizes)


def _mesh_on(plan: Plan, hardware: Hardware) -> str:
    """What to write for a mesh of the planned devices, or `""` where they are in several processes."""
    count = len(plan.devices.value)
    return f'mesh={{"batch": 1, "model": {count}}}, layout="auto"' if hardware.worker_count < 2 and count > 1 else ""


def _hold(model: Any, strategy: tf.distribute.Strategy, shard: str | None, least: int) -> None:
    if shard == "parameters":
        return
    if shard == "optimizer":
        add_copies(strategy, model)
        create_in_shards(strategy, copies=True, min_bytes=least)
    else:
        create_whole(strategy)
        unshard(strategy, model)


def _in_words(shard: str | None) -> str:
    return f'"{shard}"' if shard else "whole"
