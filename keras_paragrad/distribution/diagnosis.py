"""The output of `doctor`: versions, detected hardware, the plan for it, and whether a collective works."""

import platform

import keras
import tensorflow as tf

import keras_paragrad
import keras_paragrad.compat
from keras_paragrad.distribution.clusters.kind import sources_in_words
from keras_paragrad.distribution.explain import Explanation
from keras_paragrad.distribution.hardware import Device, Hardware, detect
from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.plan import make_plan
from keras_paragrad.distribution.probe import probed_devices, run_probe
from keras_paragrad.plain_text import show


def diagnose(seconds: float) -> int:
    """Prints the findings."""
    _print_pairs("Versions", _versions())
    try:
        hardware = detect()
    except ValueError as error:
        print(f"\nThe cluster description in the environment is malformed: {error}")
        return 1
    _print_pairs("Found", _findings(hardware))
    return max(_plan(hardware), _probe(hardware, seconds))


def _versions() -> list[tuple[str, str]]:
    return [
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("tensorflow", tf.__version__),
        ("keras", f"{keras.__version__}, on {keras.backend.backend()}"),
        ("keras_paragrad", keras_paragrad.__version__),
    ]


def _findings(hardware: Hardware) -> list[tuple[str, str]]:
    rows = [
        ("processors", str(hardware.cpu_count)),
        ("memory", _gibibytes(hardware.memory_bytes)),
        ("logical devices", ", ".join(device.name for device in hardware.devices)),
        ("GPUs", "; ".join(_in_words(gpu) for gpu in hardware.gpus) or "none"),
        ("TPUs", "; ".join(_in_words(tpu) for tpu in hardware.tpus) or "none"),
    ]
    cluster = hardware.cluster
    if cluster is None:
        return [*rows, ("cluster", f"none: no {sources_in_words()} variables")]
    tasks = "; ".join(f"{job} {', '.join(hosts)}" for job, hosts in cluster.jobs.items())
    return [*rows, ("cluster", f"from {cluster.source}: {tasks}"), ("this task", f"{cluster.job} {cluster.index}")]


def _in_words(device: Device) -> str:
    capability = device.compute_capability
    parts = [f"{device.name} {device.description}".strip(), _gibibytes(device.memory_bytes)]
    return ", ".join([*parts, f"compute capability {capability[0]}.{capability[1]}"] if capability else parts)


def _gibibytes(count: int | None) -> str:
    return "memory unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _plan(hardware: Hardware) -> int:
    try:
        plan = make_plan(hardware, Options())
    except ValueError as error:
        print(f"\nDistributedFit() would refuse: {error}")
        return 1
    show(Explanation(plan, hardware))
    return 0


def _probe(hardware: Hardware, seconds: float) -> int:
    probe = run_probe(probed_devices(hardware), seconds)
    print(f"An all-reduce over {', '.join(probe.devices)} {probe.says}.")
    return 0 if probe.works else 1


def _print_pairs(title: str, pairs: list[tuple[str, str]]) -> None:
    print(title)
    for name, value in pairs:
        print(f"  {name.ljust(max(len(name) for name, _ in pairs))}  {value}")
