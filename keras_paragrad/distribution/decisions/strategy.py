"""Decides the strategy, the devices, the number of replicas, and whether the result must equal one device's."""

import functools

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision, decides, list_of
from keras_paragrad.distribution.hardware import Hardware, kind_of_device
from keras_paragrad.distribution.options import STRATEGY_KINDS, Options, Planner, StrategyKind, kind_of_strategy

SHARED_CORES = "logical devices of a CPU share its cores: replicas on them cost time and save none"
SHARED_CORES_MEASURED = (
    "measured on two cores, a dense model of 1.3 million weights: 19 ms per step, 24 on two replicas"
)
LAUNCH = "python -m keras_paragrad launch --workers 2 train.py"


@decides(10, same_on_all_workers=False)
def decide_strategy(hardware: Hardware, options: Options) -> Decision:
    """Takes the requested strategy, or the one that uses all devices.

    Returns:
        `"none"`, `"one_device"`, `"mirrored"`, `"multi_worker"` or `"tpu"`.
    """
    if options.given is not None:
        kind = kind_of_strategy(options.given)
        return Decision("strategy", kind, "given", f"a {type(options.given).__name__}", 'strategy="auto"')
    if isinstance(options.strategy, Planner):
        return Decision(
            "strategy", type(options.strategy).__name__, "given", hardware_in_words(hardware), 'strategy="auto"'
        )
    alone = options.strategy == "multi_worker" and hardware.trains_alone
    if options.strategy != "auto" and not alone:
        name = str(options.strategy)
        _check_named(name, hardware)
        return Decision("strategy", name, "requested", hardware_in_words(hardware), 'strategy="auto"')
    return _choose(hardware, options)


@decides(130)
def decide_exact(hardware: Hardware, options: Options) -> Decision:
    """Decides whether the result must equal one device's: `True`, unless `exact=False` is requested."""
    if not options.exact:
        return Decision("exact", False, "requested", "Keras's own step is used", "exact=True")
    reason = "uneven batches, clipping, weights and non-finite gradients are handled as on one device"
    evidence = "the tests compare with one device on the whole batch"
    if hardware.of_kind("GPU") or hardware.tpus:
        evidence += "; they have run on CPUs, and not on this kind of device"
    return Decision("exact", True, reason, evidence, "exact=False")


def hardware_in_words(hardware: Hardware) -> str:
    """The devices of this process and the cluster, in a line."""
    parts = [_counted(len(devices), kind) for kind in ("CPU", "GPU") if (devices := hardware.of_kind(kind))]
    parts += ["a TPU"] if hardware.tpus else []
    words = f"{', '.join(parts)} in this process" if parts else "no device"
    cluster = hardware.cluster
    if cluster is None:
        return f"{words}; no cluster"
    jobs = ", ".join(_counted(len(hosts), job) for job, hosts in cluster.jobs.items())
    return f"{words}; {cluster.source} has {jobs}, and this is {cluster.job} {cluster.index}"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _choose(hardware: Hardware, options: Options) -> Decision:
    """Decides the strategy by the hardware, if none is requested."""
    cluster, gpus = hardware.cluster, hardware.of_kind("GPU")
    decision = functools.partial(Decision, "strategy", evidence=hardware_in_words(hardware))
    if cluster and cluster.job == "evaluator":
        reason = "an evaluator doesn't train with the workers"
        return decision("none", reason, override='strategy="one_device", devices=["CPU:0"]')
    if options.devices is None and hardware.tpus:
        return decision("tpu", "there is a TPU", override='strategy="none"')
    if hardware.worker_count > 1:
        reason = f"{hardware.worker_count} workers train together"
        return decision("multi_worker", reason, override='strategy="none", to train on each worker separately')
    if options.devices is not None and len(options.devices) > 1:
        return decision("mirrored", f"{len(options.devices)} devices are named", override="devices=None")
    if options.devices is not None:
        return decision("one_device", "one device is named", override="devices=None")
    if len(gpus) > 1:
        return decision("mirrored", f"there are {len(gpus)} GPUs", override='devices=["GPU:0"]')
    if gpus:
        reason = "Keras uses the one GPU by itself"
        return decision("none", reason, override='strategy="one_device", devices=["CPU:0"]')
    if len(hardware.of_kind("CPU")) > 1:
        evidence = f"{hardware_in_words(hardware)}; {SHARED_CORES_MEASURED}"
        return decision("none", SHARED_CORES, evidence=evidence, override='strategy="mirrored"')
    return decision("none", "there is one device", override='strategy="one_device"')


def _check_named(name: str, hardware: Hardware) -> None:
    """Refuses a named strategy that does not work on this hardware."""
    cluster, workers = hardware.cluster, hardware.worker_count
    detected = f"Found: {hardware_in_words(hardware)}"
    has_servers = bool(cluster and cluster.jobs.get("ps"))
    kind = STRATEGY_KINDS[name]
    if kind.on_tpu and not hardware.tpus:
        raise ValueError(
            'strategy="tpu", but no TPU was found: neither TensorFlow nor TPU_NAME names one. Set TPU_NAME, or write '
            'strategy="auto".'
        )
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


@decides(20, same_on_all_workers=False)
def decide_devices(hardware: Hardware, options: Options, kind: StrategyKind) -> Decision:
    """Takes the named devices, or the devices that the strategy would use.

    Returns:
        The names of this process's devices, as a tuple; empty if the strategy defines its own.
    """
    if options.given is not None:
        return Decision(
            "devices", (), "the strategy that was passed defines them", devices_in_words(hardware), 'strategy="auto"'
        )
    if options.devices is not None:
        return requested_devices(tuple(options.devices), hardware)
    if kind.on_tpu:
        names = tuple(device.name for device in hardware.of_kind("TPU"))
        reason = "all of the TPU's cores" if names else "TensorFlow names the TPU's cores once it has connected"
        return Decision("devices", names, reason, devices_in_words(hardware), 'strategy="none"')
    names = tuple(device.name for device in hardware.of_kind("GPU") or hardware.of_kind("CPU"))
    device = kind_of_device(names[0])
    if kind.mirrors and (hardware.of_kind("GPU") or not kind.on_workers):
        everywhere = " of each worker; all workers must have the same number" if kind.on_workers else ""
        reason = f"a replica on each {device}{everywhere}"
        return Decision("devices", names, reason, devices_in_words(hardware), _fewer(names))
    others = names[:2] if kind.on_workers else names[1:2]
    override = f"devices={list_of(others)}" if len(names) > 1 else NO_CHOICE
    return Decision("devices", names[:1], f"the first {device}", devices_in_words(hardware), override)


@decides(30, same_on_all_workers=False)
def decide_replicas(hardware: Hardware, options: Options, kind: StrategyKind, devices: tuple[str, ...]) -> Decision:
    """Counts the replicas over all workers; `None` until TensorFlow has connected to a TPU."""
    if options.given is not None:
        count = int(options.given.num_replicas_in_sync)
        evidence = f"a {type(options.given).__name__}"
        return Decision("replicas", count, "as many as the strategy has", evidence, 'strategy="auto"')
    if kind.on_tpu:
        count = len(devices) or None
        return Decision("replicas", count, "one on each core", devices_in_words(hardware), 'strategy="none"')
    workers = hardware.worker_count if kind.on_workers else 1
    count = workers * len(devices)
    evidence = f"{workers} worker{'s' * (workers > 1)} with {len(devices)} device{'s' * (len(devices) > 1)} each"
    override = "fewer devices, or fewer workers" if count > 1 else 'strategy="mirrored", with several devices'
    return Decision("replicas", count, "one on each device", evidence, override)


def _fewer(names: tuple[str, ...]) -> str:
    """What to write to use fewer of these devices, if there are several."""
    return f"devices={list_of(names[1:3])}" if len(names) > 1 else NO_CHOICE


def requested_devices(named: tuple[str, ...], hardware: Hardware) -> Decision:
    """The decision for named devices."""
    _check_available(named, hardware)
    return Decision("devices", named, "requested", devices_in_words(hardware), "devices=None")


def devices_in_words(hardware: Hardware) -> str:
    """The devices of this process, in a line."""
    names = [f"{one.name} ({one.description})" if one.description else one.name for one in hardware.devices]
    rest = f" and {len(names) - 9} more" if len(names) > 9 else ""
    unconnected = [] if hardware.of_kind("TPU") else [device.description or device.name for device in hardware.tpus]
    return f"found {', '.join([*names[:9], *unconnected])}{rest}"


def _check_available(named: tuple[str, ...], hardware: Hardware) -> None:
    """Refuses named devices that TensorFlow does not have."""
    available = [device.name for device in hardware.devices]
    missing = [name for name in named if name not in available]
    if not missing:
        return
    if all(kind_of_device(name) == "CPU" for name in missing):
        fix = splitting_cpu(len(named))
    else:
        fix = "Name some of these, or leave devices out; CUDA_VISIBLE_DEVICES may hide others."
    raise ValueError(f"devices names {', '.join(missing)}, but TensorFlow has {', '.join(available)}. {fix}")


def splitting_cpu(count: int) -> str:
    """Advice for an error: how to split the CPU into logical devices."""
    return (
        "To split the CPU into logical devices, run this first: tf.config.set_logical_device_configuration("
        f'tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * {count}).'
    )
