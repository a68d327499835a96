"""Decides the devices and the number of replicas."""

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision, decides, list_of
from keras_paragrad.distribution.hardware import Hardware, kind_of_device
from keras_paragrad.distribution.options import Options

NAME = "devices"


@decides(20, alike=False)
def decide_devices(hardware: Hardware, options: Options, strategy: str) -> Decision:
    """Takes the named devices, or those that the strategy would use.

    Returns:
        The names of this process's devices, as a tuple; empty if the strategy defines its own.
    """
    if options.given is not None:
        return Decision(
            NAME, (), "the strategy that was passed defines them", devices_in_words(hardware), 'strategy="auto"'
        )
    if options.devices is not None:
        return requested_devices(tuple(options.devices), hardware)
    if strategy == "tpu":
        names = tuple(device.name for device in hardware.of_kind("TPU"))
        reason = "all of the TPU's cores" if names else "TensorFlow names the TPU's cores once it has connected"
        return Decision(NAME, names, reason, devices_in_words(hardware), 'strategy="none"')
    names = tuple(device.name for device in hardware.of_kind("GPU") or hardware.of_kind("CPU"))
    if strategy == "mirrored":
        reason = f"a replica on each {kind_of_device(names[0])}"
        return Decision(NAME, names, reason, devices_in_words(hardware), _fewer(names))
    if strategy == "multi_worker" and hardware.of_kind("GPU"):
        reason = "a replica on each GPU of each worker; all workers must have the same number"
        return Decision(NAME, names, reason, devices_in_words(hardware), _fewer(names))
    kind = kind_of_device(names[0])
    others = names[:2] if strategy == "multi_worker" else names[1:2]
    override = f"devices={list_of(others)}" if len(names) > 1 else NO_CHOICE
    return Decision(NAME, names[:1], f"the first {kind}", devices_in_words(hardware), override)


@decides(30, alike=False)
def decide_replicas(hardware: Hardware, options: Options, strategy: str, devices: tuple[str, ...]) -> Decision:
    """Counts the replicas over all workers; `None` until TensorFlow has connected to a TPU."""
    if options.given is not None:
        count = int(options.given.num_replicas_in_sync)
        evidence = f"a {type(options.given).__name__}"
        return Decision("replicas", count, "as many as the strategy has", evidence, 'strategy="auto"')
    if strategy == "tpu":
        count = len(devices) or None
        return Decision("replicas", count, "one on each core", devices_in_words(hardware), 'strategy="none"')
    workers = hardware.worker_count if strategy == "multi_worker" else 1
    count = workers * len(devices)
    evidence = f"{workers} worker{'s' * (workers > 1)} with {len(devices)} device{'s' * (len(devices) > 1)} each"
    override = "fewer devices, or fewer workers" if count > 1 else 'strategy="mirrored", with several devices'
    return Decision("replicas", count, "one on each device", evidence, override)


def _fewer(names: tuple[str, ...]) -> str:
    return f"devices={list_of(names[1:3])}" if len(names) > 1 else NO_CHOICE


def requested_devices(named: tuple[str, ...], hardware: Hardware) -> Decision:
    """The decision for named devices."""
    _check_available(named, hardware)
    return Decision(NAME, named, "requested", devices_in_words(hardware), "devices=None")


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
