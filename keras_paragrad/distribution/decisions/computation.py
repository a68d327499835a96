"""Decides which part of the step XLA compiles, and the precision; used by the plan and the profiler's advice."""

from collections.abc import Sequence

import keras

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision, decides
from keras_paragrad.distribution.hardware import Hardware, kind_of_device
from keras_paragrad.distribution.options import Options, StrategyKind

XLA_ON_CPUS = "on CPUs, XLA runs convolutions in a loop on one core"
ACROSS = "XLA can't compile a step across devices: it fails in a MirroredStrategy, and the ring refuses it"


def compiled_form(kind: StrategyKind, replicas: int | None) -> str:
    """What `jit_compile=True` compiles: the `"whole_step"`, or `"per_replica"` the forward and backward pass."""
    return "whole_step" if kind.on_tpu or replicas == 1 else "per_replica"


@decides(70)
def decide_jit(
    hardware: Hardware, options: Options, kind: StrategyKind, devices: tuple[str, ...], replicas: int | None
) -> Decision:
    """Decides what XLA compiles of a model whose `jit_compile` is Keras's default, `"auto"`.

    Returns:
        `"none"`, `"whole_step"`, `"per_replica"` or `"per_stage"`.
    """
    name = "jit"
    form = compiled_form(kind, replicas)
    per_replica = form == "per_replica"
    evidence = ACROSS if per_replica else "one program on one device"
    if kind.on_tpu:
        if options.jit is False:
            raise ValueError("jit=False, but a TPU runs only what XLA has compiled. Leave jit out.")
        return Decision(name, form, "a TPU runs nothing else", "TensorFlow's TPU runtime is XLA", NO_CHOICE)
    if options.jit is True:
        return Decision(name, form, "requested", evidence, "jit=False")
    if options.jit is False:
        return Decision(name, "none", "requested", evidence, "jit=True")
    if options.deterministic:
        reason = "deterministic training has the same bits with XLA nowhere, or everywhere"
        return Decision(name, "none", reason, "what XLA computes differs in the last bits", "jit=True")
    # A strategy that was passed is assumed to use the GPUs, if there are any.
    device = kind_of_device(devices[0]) if devices else "GPU" if hardware.of_kind("GPU") else "CPU"
    if not gains_from_xla(device):
        reason = f'Keras\'s "auto" leaves CPUs alone; jit_compile=True in compile() still holds, as {form}'
        return Decision(name, "none", reason, XLA_ON_CPUS, "jit=True")
    reason = "what Keras does on one such device" + ", on each replica" * per_replica
    return Decision(name, form, reason, evidence, "jit=False")


@decides(80)
def decide_precision(hardware: Hardware, options: Options, kind: StrategyKind, devices: tuple[str, ...]) -> Decision:
    """Keeps the dtype policy that is set, unless another is requested: a faster one would change the results.

    Returns:
        The name of a Keras dtype policy.
    """
    name = "precision"
    current = keras.config.dtype_policy().name
    if options.precision not in (None, "auto"):
        return Decision(name, options.precision, "requested", _caution(options.precision, hardware), "precision=None")
    if options.precision is None:
        return Decision(
            name, current, "the policy that is set", "precision=None requests no advice", 'precision="auto"'
        )
    faster, evidence = _faster(hardware, kind.on_tpu, devices)
    reason = "the policy that is set; another would change the results"
    if faster is None or current != "float32":
        evidence = evidence if faster is None else f"it isn't float32, the one that {faster} would replace"
        return Decision(name, current, reason, evidence, 'precision="mixed_bfloat16"')
    return Decision(name, current, reason, f"{faster} would be faster: {evidence}", f'precision="{faster}"')


def _faster(hardware: Hardware, on_tpu: bool, devices: tuple[str, ...]) -> tuple[str | None, str]:
    """`faster_policy` for the devices that train; for all GPUs, if no devices are known."""
    if on_tpu:
        return faster_policy("TPU")
    gpus = [gpu for gpu in hardware.of_kind("GPU") if not devices or gpu.name in devices]
    return faster_policy("GPU" if gpus else "CPU", [gpu.compute_capability for gpu in gpus])


def _caution(policy: str | None, hardware: Hardware) -> str:
    """A caution about a requested dtype policy on this hardware; empty if there is none."""
    if policy == "mixed_float16" and hardware.tpus:
        return "a TPU has no units for float16; use mixed_bfloat16"
    if policy in ("mixed_float16", "mixed_bfloat16") and not hardware.of_kind("GPU") and not hardware.tpus:
        return "there is no GPU or TPU here: it saves memory at most"
    return "results differ from float32's" if policy != "float32" else ""


def gains_from_xla(kind: str) -> bool:
    """Whether XLA is known to make steps faster on a kind of device.

    On two cores of a CPU, a step of MobileNetV3Small went from 98 to 769 ms.

    Args:
        kind: `CPU`, `GPU` or `TPU`; `""` if it isn't known.
    """
    return kind in ("GPU", "TPU")


def faster_policy(kind: str, capabilities: Sequence[tuple[int, int] | None] = ()) -> tuple[str | None, str]:
    """The dtype policy that the devices have hardware units for, or `None`, and the evidence.

    On two cores of a CPU, a step of MobileNetV3Small went from 78 to 145 ms with `mixed_bfloat16`.

    Args:
        kind: `CPU`, `GPU` or `TPU`; `""` if it isn't known.
        capabilities: The compute capability of each GPU in use, such as `(8, 0)`, or `None` where it isn't known.

    Example:

    >>> from keras_paragrad.distribution.decisions.computation import faster_policy
    >>> faster_policy("GPU", [(8, 0), (7, 5)])[0]
    'mixed_float16'
    """
    if kind == "TPU":
        return "mixed_bfloat16", "a TPU multiplies in bfloat16"
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
