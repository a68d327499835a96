"""Decides the all-reduce of gradients, its bucket size, and its timeout."""

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision, decides
from keras_paragrad.distribution.hardware import Hardware, kind_of_device
from keras_paragrad.distribution.options import Options, StrategyKind

NAME = "communication"
MEASURED = (
    "measured on two busy cores, 16 MB over 2 logical devices: 1.2 to 2.5 ms, and 4.5 to 8.9 ms on the ring; a whole "
    "step took 24 and 26 ms"
)
LARGE_MEASURED = "measured on two cores: a step with two such gradients takes 1% less time, and without oneDNN 20%"


@decides(40)
def decide_communication(
    hardware: Hardware, options: Options, kind: StrategyKind, devices: tuple[str, ...], replicas: int | None
) -> Decision:
    """Takes the requested all-reduce, or the fastest that works on these devices.

    Returns:
        `"nccl"`, `"ring"`, `"hierarchical_copy"`, `"one_device"`, `"none"`, or `"given"` for a strategy object.
    """
    if options.given is not None:
        return Decision(
            NAME, "given", "the strategy was created with its own", _devices_in_words(devices), 'strategy="auto"'
        )
    if kind.on_tpu or replicas == 1:
        reason = "a TPU brings its own" if kind.on_tpu else "there is one replica: nothing to all-reduce"
        return no_communication(hardware, options, kind, devices, reason)
    # A ring needs several workers, and an elastic world may have one left.
    requested = "auto" if hardware.trains_alone and options.communication == "ring" else options.communication
    _check_requested(requested, hardware, kind, devices)
    if requested != "auto":
        return Decision(NAME, requested, "requested", _devices_in_words(devices), 'communication="auto"')
    return _fastest(hardware, kind.on_workers, kind_of_device(devices[0]))


def no_communication(
    hardware: Hardware, options: Options, kind: StrategyKind, devices: tuple[str, ...], reason: str
) -> Decision:
    """The decision if nothing is all-reduced."""
    _check_requested(options.communication, hardware, kind, devices)
    return Decision(NAME, "none", reason, _devices_in_words(devices), NO_CHOICE)


def _fastest(hardware: Hardware, between_workers: bool, device: str) -> Decision:
    """Chooses the fastest all-reduce that works between several devices of a kind."""
    if device == "CPU" and between_workers:
        reason = "the only one that works between CPUs of several processes"
        evidence = "TensorFlow's own choice (AUTO) aborts the process there"
        return Decision(NAME, "ring", reason, evidence, "nothing else works")
    if device == "CPU":
        reason = "devices share one memory: reducing on one of them is fastest"
        return Decision(NAME, "one_device", reason, MEASURED, 'communication="ring"')
    if hardware.has_virtual_gpus:
        override = "nothing else works" if between_workers else 'communication="one_device"'
        reason, evidence = "NCCL doesn't support parts of a GPU", "TensorFlow's own choice for them"
        return Decision(NAME, "ring", reason, evidence, override)
    other = "ring" if between_workers else "hierarchical_copy"
    reason = "NVIDIA's own, over NVLink where there is one"
    evidence = "usually the fastest, by TensorFlow's documentation; not measured by us"
    return Decision(NAME, "nccl", reason, evidence, f'communication="{other}"')


@decides(50)
def decide_pack_bytes(options: Options, communication: str) -> Decision:
    """Decides the bytes of gradients per bucket.

    Returns:
        The bytes; 0 for a single bucket, except that between CPUs gradients of 1 MiB and more are reduced separately;
        `None` if there are no buckets.
    """
    name = "pack_bytes"
    if communication not in ("nccl", "ring"):
        return Decision(name, None, "only nccl and ring have buckets", f"communication is {communication}", NO_CHOICE)
    if options.pack_bytes is not None:
        return Decision(name, options.pack_bytes, "requested", f"communication is {communication}", "pack_bytes=None")
    override = "pack_bytes=32 * 2**20"
    if communication == "ring":
        reason = "one bucket; between CPUs, large gradients are all-reduced separately, as they become available"
        return Decision(name, 0, reason, LARGE_MEASURED, override)
    reason = "gradients are all-reduced once, after the backward pass: smaller buckets would not start any earlier"
    return Decision(name, 0, reason, "0 is one bucket of all gradients", override)


@decides(60, same_on_all_workers=False)
def decide_collective_timeout(options: Options, strategy: str, kind: StrategyKind) -> Decision:
    """Decides how many seconds a collective waits for the other workers before it fails; `None` for no limit."""
    name = "collective_timeout"
    if not kind.on_workers or options.given is not None:
        reason = "no process waits for another" if options.given is None else "the given strategy has its own"
        return Decision(name, None, reason, f"strategy is {strategy}", NO_CHOICE)
    if options.collective_timeout is not None:
        thread = "TensorFlow starts a watchdog thread for each collective"
        return Decision(name, float(options.collective_timeout), "requested", thread, "collective_timeout=None")
    reason = "TensorFlow itself detects that a worker has died"
    return Decision(name, None, reason, "after 13 s, for a worker killed on the same machine", "collective_timeout=120")


def _devices_in_words(devices: tuple[str, ...]) -> str:
    """The number and the kind of this process's devices, in words."""
    return f"{len(devices)} {kind_of_device(devices[0])} here" if devices else "the strategy defines the devices"


def _check_requested(requested: str, hardware: Hardware, kind: StrategyKind, devices: tuple[str, ...]) -> None:
    """Refuses a collective implementation that does not work on these devices."""
    on_gpus = bool(devices) and kind_of_device(devices[0]) == "GPU"
    if requested == "nccl" and (not on_gpus or hardware.has_virtual_gpus):
        others = "parts of a GPU" if on_gpus else _devices_in_words(devices)
        raise ValueError(
            f'communication="nccl" works between whole GPUs, but there are {others}. Write communication="auto".'
        )
    if kind.on_workers and requested in ("hierarchical_copy", "one_device"):
        raise ValueError(
            f'communication="{requested}" works within one process, but strategy is "multi_worker". Write '
            'communication="auto", "ring" or, with GPUs, "nccl".'
        )
    mirrors_here = kind.mirrors and not kind.on_workers
    if mirrors_here and requested == "ring" and on_gpus and not hardware.has_virtual_gpus:
        raise ValueError(
            'communication="ring" is not available in a MirroredStrategy on GPUs, which uses NCCL instead. Write '
            'communication="auto", "hierarchical_copy" or "one_device".'
        )
