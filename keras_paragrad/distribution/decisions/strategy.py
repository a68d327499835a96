"""Decides the strategy, and whether the result must be that of one device."""

from keras_paragrad.distribution.decisions.decision import Decision, decides
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options, Planner, kind_of_strategy

NAME = "strategy"
SHARED_CORES = "logical devices of a CPU share its cores: replicas on them cost time and save none"
SHARED_CORES_MEASURED = "measured on two cores, a dense model of 1.3 million weights: 19 ms a step, 24 on two replicas"
LAUNCH = "python -m keras_paragrad launch --workers 2 train.py"


@decides(10, alike=False)
def decide_strategy(hardware: Hardware, options: Options) -> Decision:
    """Takes the requested strategy, or the one that uses all devices.

    Returns:
        `"none"`, `"one_device"`, `"mirrored"`, `"multi_worker"` or `"tpu"`.
    """
    if options.given is not None:
        kind = kind_of_strategy(options.given)
        return Decision(NAME, kind, "given", f"a {type(options.given).__name__}", 'strategy="auto"')
    if isinstance(options.strategy, Planner):
        return Decision(NAME, type(options.strategy).__name__, "given", hardware_in_words(hardware), 'strategy="auto"')
    if options.strategy != "auto":
        name = str(options.strategy)
        _check_named(name, hardware)
        return Decision(NAME, name, "requested", hardware_in_words(hardware), 'strategy="auto"')
    value, reason, override = _choose(hardware, options)
    measured = f"; {SHARED_CORES_MEASURED}" if reason == SHARED_CORES else ""
    return Decision(NAME, value, reason, hardware_in_words(hardware) + measured, override)


@decides(130)
def decide_exact(hardware: Hardware, options: Options) -> Decision:
    """Decides whether the result must be that of one device: `True`, unless `exact=False` is requested."""
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


def _choose(hardware: Hardware, options: Options) -> tuple[str, str, str]:
    """The strategy for the hardware, why, and what to write for another one."""
    cluster, gpus = hardware.cluster, hardware.of_kind("GPU")
    if cluster and cluster.job == "evaluator":
        return "none", "an evaluator doesn't train with the workers", 'strategy="one_device", devices=["CPU:0"]'
    if options.devices is None and hardware.tpus:
        return "tpu", "there is a TPU", 'strategy="none"'
    if hardware.worker_count > 1:
        reason = f"{hardware.worker_count} workers train together"
        return "multi_worker", reason, 'strategy="none", to train on each worker separately'
    if options.devices is not None and len(options.devices) > 1:
        return "mirrored", f"{len(options.devices)} devices are named", "devices=None"
    if options.devices is not None:
        return "one_device", "one device is named", "devices=None"
    if len(gpus) > 1:
        return "mirrored", f"there are {len(gpus)} GPUs", 'devices=["GPU:0"]'
    if gpus:
        return "none", "Keras uses the one GPU by itself", 'strategy="one_device", devices=["CPU:0"]'
    if len(hardware.of_kind("CPU")) > 1:
        return "none", SHARED_CORES, 'strategy="mirrored"'
    return "none", "there is one device", 'strategy="one_device"'


def _check_named(name: str, hardware: Hardware) -> None:
    """Refuses a named strategy that does not work on this hardware."""
    cluster, workers = hardware.cluster, hardware.worker_count
    detected = f"Found: {hardware_in_words(hardware)}"
    has_servers = bool(cluster and cluster.jobs.get("ps"))
    if name == "tpu" and not hardware.tpus:
        raise ValueError(
            'strategy="tpu", but no TPU was found: neither TensorFlow nor TPU_NAME names one. Set TPU_NAME, or write '
            'strategy="auto".'
        )
    if name == "mirrored" and (workers > 1 or has_servers):
        better = "parameter_server" if has_servers else "multi_worker"
        raise ValueError(
            f'strategy="mirrored" works within one process. {detected}. Write strategy="{better}", or '
            'strategy="none" to train in each process separately.'
        )
    if name == "multi_worker" and has_servers:
        raise ValueError(
            f'strategy="multi_worker" has no parameter servers. {detected}. Write '
            'strategy="parameter_server", or start the cluster without the job "ps".'
        )
    if name == "multi_worker" and workers < 2:
        raise ValueError(
            f'strategy="multi_worker" needs a cluster of at least two workers, and there is {workers}. '
            f'{detected}. Start them with `{LAUNCH}`, or write strategy="auto".'
        )
