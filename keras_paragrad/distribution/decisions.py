"""The decisions of the plan, which `make_plan` takes in turn: strategy, devices, all-reduce, XLA, precision, shards."""

import json
from collections.abc import Sequence
from functools import partial

import keras

from keras_paragrad.distribution.hardware import Hardware, kind_of_device
from keras_paragrad.distribution.options import (
    STRATEGY_KINDS,
    Decision,
    Options,
    Planner,
    StrategyKind,
    kind_of_strategy,
)
from keras_paragrad.plain_text import counted

LAUNCH = "python -m keras_paragrad launch --workers 2 train.py"
_AUTO = 'strategy="auto"'


def decide_strategy(hardware: Hardware, options: Options) -> Decision:
    """Takes the requested strategy, or the one that uses all devices.

    Returns:
        `"none"`, `"one_device"`, `"mirrored"` or `"multi_worker"`.
    """
    decide = partial(Decision, name="strategy", override=_AUTO)
    if options.given is not None:
        return decide(value=kind_of_strategy(options.given), reason=f"given: a {type(options.given).__name__}")
    if isinstance(options.strategy, Planner):
        return decide(value=type(options.strategy).__name__, reason="given")
    alone = options.strategy == "multi_worker" and hardware.trains_alone
    if options.strategy == "auto" or alone:
        return _best_strategy(hardware, options.devices)
    _check_named(options.strategy, hardware)
    return decide(value=options.strategy, reason="requested")


def _best_strategy(hardware: Hardware, named: Sequence[str] | None) -> Decision:
    """The strategy for the hardware, or for the named devices."""
    decide, cluster, gpus = partial(Decision, name="strategy"), hardware.cluster, hardware.of_kind("GPU")
    on_cpu = 'strategy="one_device", devices=["CPU:0"]'
    if cluster and cluster.job == "evaluator":
        return decide(value="none", reason="an evaluator doesn't train with the workers", override=on_cpu)
    if hardware.worker_count > 1:
        separately = 'strategy="none", to train on each worker separately'
        reason = f"{hardware.worker_count} workers train together"
        return decide(value="multi_worker", reason=reason, override=separately)
    if named is not None and len(named) > 1:
        return decide(value="mirrored", reason=f"{len(named)} devices are named", override="devices=None")
    if named is not None:
        return decide(value="one_device", reason="one device is named", override="devices=None")
    if len(gpus) > 1:
        return decide(value="mirrored", reason=f"there are {len(gpus)} GPUs", override='devices=["GPU:0"]')
    if gpus:
        return decide(value="none", reason="Keras uses the one GPU by itself", override=on_cpu)
    if len(hardware.of_kind("CPU")) > 1:
        reason = "logical devices of a CPU share its cores: replicas on them cost time and save none"
        return decide(value="none", reason=reason, override='strategy="mirrored"')
    return decide(value="none", reason="there is one device", override='strategy="one_device"')


def _check_named(name: str, hardware: Hardware) -> None:
    """Refuses a named strategy that does not work on this hardware."""
    cluster, workers = hardware.cluster, hardware.worker_count
    detected = f"Found: {hardware_in_words(hardware)}"
    has_servers = bool(cluster and cluster.jobs.get("ps"))
    kind = STRATEGY_KINDS[name]
    if kind.mirrors and not kind.on_workers and (workers > 1 or has_servers):
        better = "parameter_server" if has_servers else "multi_worker"
        raise ValueError(
            f'strategy="mirrored" works within one process. {detected}. Write strategy="{better}", or '
            'strategy="none" to train in each process separately.'
        )
    if kind.on_workers and has_servers:
        raise ValueError(
            f'strategy="multi_worker" has no parameter servers. {detected}. Write '
            'strategy="parameter_server", or start the cluster without the job "ps".'
        )
    if kind.on_workers and workers < 2:
        raise ValueError(
            f'strategy="multi_worker" needs a cluster of at least two workers, and there is {workers}. '
            f'{detected}. Start them with `{LAUNCH}`, or write strategy="auto".'
        )


def hardware_in_words(hardware: Hardware) -> str:
    """The devices of this process and the cluster, in a line."""
    parts = [counted(len(devices), kind) for kind in ("CPU", "GPU") if (devices := hardware.of_kind(kind))]
    words = f"{', '.join(parts)} in this process" if parts else "no device"
    cluster = hardware.cluster
    if cluster is None:
        return f"{words}; no cluster"
    jobs = ", ".join(counted(len(hosts), job) for job, hosts in cluster.jobs.items())
    return f"{words}; {cluster.source} has {jobs}, and this is {cluster.job} {cluster.index}"


def decide_devices(hardware: Hardware, options: Options, kind: StrategyKind) -> Decision:
    """Takes the named devices, or the devices that the strategy would use.

    Returns:
        The names of this process's devices, as a tuple; empty if the strategy defines its own.
    """
    decide = partial(Decision, name="devices")
    if options.given is not None:
        return decide(value=(), reason="the strategy that was passed defines them", override=_AUTO)
    if options.devices is not None:
        return requested_devices(tuple(options.devices), hardware)
    names = tuple(device.name for device in hardware.of_kind("GPU") or hardware.of_kind("CPU"))
    device = kind_of_device(names[0])
    chosen, reason, others = names[:1], f"the first {device}", names[:2] if kind.on_workers else names[1:2]
    if kind.mirrors and (hardware.of_kind("GPU") or not kind.on_workers):
        everywhere = " of each worker; all workers must have the same number" if kind.on_workers else ""
        chosen, reason, others = names, f"a replica on each {device}{everywhere}", names[1:3]
    if len(names) == 1:
        return decide(value=chosen, reason=reason)
    return decide(value=chosen, reason=reason, override=devices_argument(others))


def devices_argument(names: Sequence[str]) -> str:
    """The argument `devices`, as it is written."""
    return f"devices={json.dumps(list(names))}"


def requested_devices(named: tuple[str, ...], hardware: Hardware) -> Decision:
    """The decision for named devices."""
    available = [device.name for device in hardware.devices]
    if missing := [name for name in named if name not in available]:
        fix = "Name some of these, or leave devices out; CUDA_VISIBLE_DEVICES may hide others."
        if all(kind_of_device(name) == "CPU" for name in missing):
            fix = splitting_cpu(len(named))
        raise ValueError(f"devices names {', '.join(missing)}, but TensorFlow has {', '.join(available)}. {fix}")
    return Decision(name="devices", value=named, reason="requested", override="devices=None")


def splitting_cpu(count: int) -> str:
    """Advice for an error: how to split the CPU into logical devices."""
    return (
        "To split the CPU into logical devices, run this first: tf.config.set_logical_device_configuration("
        f'tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * {count}).'
    )


def decide_replicas(hardware: Hardware, options: Options, kind: StrategyKind, devices: tuple[str, ...]) -> Decision:
    """Counts the replicas over all workers."""
    decide = partial(Decision, name="replicas")
    if options.given is not None:
        count = int(options.given.num_replicas_in_sync)
        return decide(value=count, reason="as many as the strategy has", override=_AUTO)
    count = (hardware.worker_count if kind.on_workers else 1) * len(devices)
    override = "fewer devices, or fewer workers" if count > 1 else 'strategy="mirrored", with several devices'
    return decide(value=count, reason="one on each device", override=override)


def decide_communication(
    hardware: Hardware, options: Options, kind: StrategyKind, devices: tuple[str, ...], replicas: int
) -> Decision:
    """Decides how gradients are all-reduced: in the fastest way that works on these devices.

    Returns:
        `"nccl"`, `"ring"`, `"one_device"`, `"none"`, or `"given"` for a strategy object.
    """
    decide = partial(Decision, name="communication")
    if options.given is not None:
        return decide(value="given", reason="the strategy was created with its own", override=_AUTO)
    if replicas == 1:
        return decide(value="none", reason="there is one replica: nothing to all-reduce")
    if kind_of_device(devices[0]) == "CPU" and kind.on_workers:
        return decide(value="ring", reason="the only one that works between CPUs of several processes")
    override = "strategy=tf.distribute.MirroredStrategy(cross_device_ops=...)"
    if kind.on_workers:
        override = "strategy=tf.distribute.MultiWorkerMirroredStrategy(communication_options=...)"
    if kind_of_device(devices[0]) == "CPU":
        reason = "devices share one memory: reducing on one of them is fastest"
        return decide(value="one_device", reason=reason, override=override)
    if hardware.has_virtual_gpus:
        return decide(value="ring", reason="NCCL doesn't support parts of a GPU", override=override)
    return decide(value="nccl", reason="NVIDIA's own, over NVLink where there is one", override=override)


def decide_jit(hardware: Hardware, options: Options, devices: tuple[str, ...], replicas: int) -> Decision:
    """Decides what XLA compiles of a model whose `jit_compile` is Keras's default, `"auto"`.

    Returns:
        `"none"`, `"whole_step"`, `"per_replica"` or `"per_stage"`.
    """
    # XLA can't compile a step across devices, but each replica's forward and backward pass.
    form, across = ("whole_step", "") if replicas == 1 else ("per_replica", "; XLA can't compile a step across devices")
    if options.jit is True:
        return Decision(name="jit", value=form, reason=f"requested{across}", override="jit=False")
    # A strategy that was passed is assumed to use the GPUs, if there are any.
    device = kind_of_device(devices[0]) if devices else "GPU" if hardware.of_kind("GPU") else "CPU"
    if options.jit is False:
        reason = "requested"
    elif options.deterministic:
        reason = "deterministic training has the same bits with XLA nowhere, or everywhere"
    elif not gains_from_xla(device):
        reason = f'Keras\'s "auto" leaves CPUs alone; jit_compile=True in compile() still holds, as {form}'
    else:
        return Decision(
            name="jit", value=form, reason=f"what Keras does on one such device{across}", override="jit=False"
        )
    return Decision(name="jit", value="none", reason=reason, override="jit=True")


def decide_precision(hardware: Hardware, devices: tuple[str, ...]) -> Decision:
    """Keeps the dtype policy that is set: a faster one would change the results.

    Returns:
        The name of a Keras dtype policy.
    """
    current, faster, why = keras.config.dtype_policy().name, None, ""
    if current == "float32":
        gpus = [gpu for gpu in hardware.of_kind("GPU") if not devices or gpu.name in devices]
        faster, why = faster_policy("GPU" if gpus else "CPU", [gpu.compute_capability for gpu in gpus])
    gain = f"{faster} would be faster ({why}), but " if faster else ""
    reason = f"the policy that is set; {gain}another would change the results"
    override = f'keras.config.set_dtype_policy("{faster or "mixed_bfloat16"}")'
    return Decision(name="precision", value=current, reason=reason, override=override)


def gains_from_xla(kind: str) -> bool:
    """Whether XLA is known to make steps faster on a kind of device, `CPU` or `GPU`; `""` if it isn't known.

    On two cores of a CPU, a step of MobileNetV3Small went from 98 to 769 ms.
    """
    return kind == "GPU"


def faster_policy(kind: str, capabilities: Sequence[tuple[int, int] | None] = ()) -> tuple[str | None, str]:
    """The dtype policy that the devices have hardware units for, or `None`, and why.

    On two cores of a CPU, a step of MobileNetV3Small went from 78 to 145 ms with `mixed_bfloat16`.

    Args:
        kind: `CPU` or `GPU`; `""` if it isn't known.
        capabilities: The compute capability of each GPU in use, such as `(8, 0)`, or `None` where it isn't known.

    Example:

    >>> from keras_paragrad.distribution.decisions import faster_policy
    >>> faster_policy("GPU", [(8, 0), (7, 5)])[0]
    'mixed_float16'
    """
    if kind != "GPU":
        return None, "CPUs are not known to gain from another policy"
    known = [capability for capability in capabilities if capability is not None]
    if not known or len(known) < len(capabilities):
        return None, "the GPU's compute capability is not known"
    least = min(known)
    capability = f"compute capability {least[0]}.{least[1]}"
    if least >= (8, 0):
        return "mixed_bfloat16", f"{capability} has tensor cores for it, and it needs no loss scaling"
    if least >= (7, 0):
        return "mixed_float16", f"{capability} has tensor cores for it; it needs loss scaling"
    return None, f"{capability} has no tensor cores"


def decide_shard(hardware: Hardware, options: Options, strategy: str, kind: StrategyKind, replicas: int) -> Decision:
    """Decides which state each replica holds in shards.

    Returns:
        `"none"`, `"optimizer"` or `"parameters"`; or `"auto"`, until `fit_memory` knows the model.
    """
    chosen = options.fit_memory and options.shard is None
    if options.shard is None and not chosen:
        reason = "not requested: each replica holds all variables"
        if not kind.mirrors:
            return Decision(name="shard", value="none", reason=reason)
        return Decision(name="shard", value="none", reason=reason, override='shard="parameters"')
    if (chosen and not kind.mirrors) or (replicas == 1 and (chosen or hardware.trains_alone)):
        return Decision(name="shard", value="none", reason="one replica has nobody to share with")
    if chosen:
        reason = "chosen when fit or prepare gets the model: the least that fits the devices"
        return Decision(name="shard", value="auto", reason=reason, override='shard="optimizer"')
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
    reason = f"requested; each replica holds {whole} whole"
    return Decision(name="shard", value=options.shard, reason=reason, override="shard=None")


def decide_shard_policy(options: Options, kind: StrategyKind) -> Decision:
    """Decides how workers share the data.

    Returns:
        `"data"` or `"already_sharded"`.
    """
    name, policy = "shard_policy", options.shard_policy
    if not kind.on_workers:
        return Decision(name=name, value="data", reason="one process reads all the data")
    if policy == "already_sharded":
        reason = "requested: each worker's dataset already holds its own shard"
        return Decision(name=name, value=policy, reason=reason, override='shard_policy="data"')
    reason = "works for any data: each worker reads all of it and keeps its shards"
    return Decision(name=name, value="data", reason=reason, override='shard_policy="already_sharded"')


def decide_exact(options: Options) -> Decision:
    """Decides whether the result must equal one device's: `True`, unless `exact=False` is requested."""
    if not options.exact:
        reason = "requested: Keras's own step is used"
        return Decision(name="exact", value=False, reason=reason, override="exact=True")
    reason = "uneven batches, clipping, weights and non-finite gradients are handled as on one device"
    return Decision(name="exact", value=True, reason=reason, override="exact=False")
