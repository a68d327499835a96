"""Decides which state is in shards; with `shard="auto"`, the cheapest choice whose step fits the devices."""

import logging

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Specs
from keras_paragrad.compat.workers import gather
from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision, decides
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options, StrategyKind
from keras_paragrad.distribution.parallelism import PlannedRun
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.memory.available import STEP_SHARE
from keras_paragrad.memory.estimate import Estimate, bytes_in_words, estimate_memory
from keras_paragrad.storage.creation import add_copies, create_in_shards, create_whole, unshard

_log = logging.getLogger("keras_paragrad")
_EVIDENCE = "Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054"


@decides(85)
def decide_shard(
    hardware: Hardware, options: Options, strategy: str, kind: StrategyKind, replicas: int | None
) -> Decision:
    """Decides which state each replica holds in shards.

    Returns:
        `"none"`, `"optimizer"` or `"parameters"`; or `"auto"`, until the model is known.
    """
    name = "shard"
    chosen = options.shard == "auto" or (options.fit_memory and options.shard is None)
    if options.shard is None and not chosen:
        override = 'shard="parameters"' if kind.mirrors else NO_CHOICE
        return Decision(name, "none", "not requested", "each replica holds all variables", override)
    if (chosen and not kind.mirrors) or (replicas == 1 and (chosen or hardware.trains_alone)):
        return Decision(name, "none", "one replica has nobody to share with", "", NO_CHOICE)
    if chosen:
        reason = "chosen when fit or prepare gets the model: the least that fits the devices"
        override = 'shard="optimizer"' if options.fit_memory else "shard=None"
        return Decision(name, "auto", reason, _EVIDENCE, override)
    requested = f'shard="{options.shard}"'
    if not kind.mirrors:
        raise ValueError(
            f"{requested}, but with strategy={strategy!r} there are no replicas that could each hold a shard. Write "
            'strategy="mirrored" with two devices or more, or "multi_worker", or leave shard out.'
        )
    if replicas == 1:
        raise ValueError(
            f"{requested} needs two replicas or more, and there is one. Name more devices, or leave shard out."
        )
    whole = "weights" if options.shard == "optimizer" else "a layer's weights while it is called"
    return Decision(name, options.shard, f"requested; each replica holds {whole} whole", _EVIDENCE, "shard=None")


def choose_shard(model: keras.Model, batch_size: int, batch_spec: Specs, run: PlannedRun) -> tuple[Decision, Estimate]:
    """Chooses which state is in shards, and reshards a model that was built in shards; called on every worker.

    Args:
        model: The model, compiled and built.
        batch_size: Examples in a batch.
        batch_spec: The `tf.TypeSpec` of batches, or `None` to derive it from the model.
        run: The plan and the strategies; models are built in shards under `run.strategies.models`.

    Returns:
        The decision, and the estimate behind it.

    Raises:
        ValueError: The model isn't built, its step can't be traced, or the devices' memory is unknown.
    """
    device_bytes, strategy = _device_bytes(run), run.strategies.models
    if not model.built:
        raise ValueError(
            f'shard="auto" estimates the memory of a step, and {model.name!r} has no weights yet. Build it within '
            "`with dist.scope():`, by calling it on a batch or with model.build(input_shape)."
        )
    estimate = estimate_memory(
        model,
        batch_size,
        strategy.num_replicas_in_sync,
        per_replica=run.plan.batch.value == "per_replica",
        min_shard_bytes=run.options.min_shard_bytes,
        batch_spec=batch_spec,
    )
    # The bytes of a step for each value of `shard`, in the order of preference.
    totals = {column.shard: column.total for column in estimate.columns if not column.recompute}
    # Workers must choose the same: by the chief's estimate and the smallest device.
    gathered = gather(strategy, np.array([device_bytes, *totals.values()], np.int64))
    device_bytes, totals = int(gathered[:, 0].min()), dict(zip(totals, gathered[0, 1:].tolist(), strict=True))
    shard = next((choice for choice, total in totals.items() if total <= STEP_SHARE * device_bytes), "parameters")
    words = {choice: f'"{choice}"' if choice else "whole" for choice in totals}
    reason = ", ".join(f"{words[choice]} {bytes_in_words(total)}" for choice, total in totals.items())
    evidence = f"{bytes_in_words(device_bytes)} per device; a step may take {STEP_SHARE:.0%}"
    overrides = [f"shard={choice!r}" for choice in totals if choice != shard]
    if totals[shard] > STEP_SHARE * device_bytes:
        mesh = _mesh_arguments(run.plan, run.hardware)
        evidence += "; neither whole variables nor shards fit"
        overrides += [mesh] if mesh else []
        _log.warning(
            "A step of %s is estimated to take %s per device with shard='parameters', of %s. It may run out of memory: "
            "use a smaller batch, microbatch(model, ...), recompute(model)%s, or more devices.",
            *(model.name, bytes_in_words(totals[shard]), bytes_in_words(device_bytes)),
            f", DistributedFit({mesh}), with which a device never holds a divided layer whole" if mesh else "",
        )
    reshard(model, strategy, shard, run.options.min_shard_bytes)
    override = " or ".join(overrides)
    return Decision("shard", shard or "none", f"estimated for a step: {reason}", evidence, override), estimate


def _device_bytes(run: PlannedRun) -> int:
    """The memory of the smallest device."""
    if run.device_bytes is not None:
        return run.device_bytes
    devices = run.hardware.compute_devices(run.plan.devices.value)
    unknown = [device.name for device in devices if device.memory_bytes is None]
    raise ValueError(
        f'shard="auto" needs the memory of {", ".join(unknown) or "the devices"}, which is unknown here. Write '
        'DistributedFit(..., shard="auto", device_bytes=16 * 2**30), for instance, or choose shard=None, "optimizer" '
        'or "parameters".'
    )


def _mesh_arguments(plan: Plan, hardware: Hardware) -> str:
    """The arguments for a mesh of the planned devices, or `""` if several processes hold them."""
    count = len(plan.devices.value)
    return f'mesh={{"batch": 1, "model": {count}}}, layout="auto"' if hardware.worker_count < 2 and count > 1 else ""


def reshard(model: keras.Model, strategy: tf.distribute.Strategy, shard: str | None, min_bytes: int) -> None:
    """Changes a model built in shards: `"optimizer"` adds whole copies of parameters, `None` makes variables whole."""
    if shard == "optimizer":
        add_copies(strategy, model)
        create_in_shards(strategy, copies=True, min_bytes=min_bytes)
    elif shard != "parameters":
        create_whole(strategy)
        unshard(strategy, model)
