"""Decides how a replica computes: whether XLA compiles the step, or which part of it, and in what precision."""

import keras

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision
from keras_paragrad.distribution.decisions.registry import decides
from keras_paragrad.distribution.gains import XLA_ON_CPUS, faster_policy, gains_from_xla
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.names import kind_of_device
from keras_paragrad.distribution.options import Options

ACROSS = "XLA can't compile a step across devices: it fails in a MirroredStrategy, and the ring refuses it"


def compiled_form(strategy: str, replicas: int | None) -> str:
    """How replicas train a model that is compiled with `jit_compile=True`.

    Args:
        strategy: The strategy's kind, as in the plan.
        replicas: How many step together.

    Returns:
        `"whole_step"`, or `"per_replica"`: forward and backward, with all else outside.
    """
    return "whole_step" if strategy == "tpu" or replicas == 1 else "per_replica"


@decides(70)
def decide_jit(
    hardware: Hardware, options: Options, strategy: str, devices: tuple[str, ...], replicas: int | None
) -> Decision:
    """Decides what becomes of a model whose `jit_compile` is Keras's own `"auto"`.

    Returns:
        `"none"`, `"whole_step"`, `"per_replica"` or `"per_stage"`.
    """
    name = "jit"
    form, asked = compiled_form(strategy, replicas), options.jit
    several = form == "per_replica"
    evidence = ACROSS if several else "one program on one device"
    if strategy == "tpu":
        if asked is False:
            raise ValueError("jit=False, but a TPU runs only what XLA has compiled. Leave jit out.")
        return Decision(name, form, "a TPU runs nothing else", "TensorFlow's TPU runtime is XLA", NO_CHOICE)
    if asked is True:
        return Decision(name, form, "requested", evidence, "jit=False")
    if asked is False:
        return Decision(name, "none", "requested", evidence, "jit=True")
    if not gains_from_xla(_kind(hardware, devices)):
        reason = f'Keras\'s "auto" leaves CPUs alone; jit_compile=True in compile() still holds, as {form}'
        return Decision(name, "none", reason, XLA_ON_CPUS, "jit=True")
    reason = "what Keras does on one such device" + ", on each replica" * several
    return Decision(name, form, reason, evidence, "jit=False")


@decides(80)
def decide_precision(hardware: Hardware, options: Options, strategy: str, devices: tuple[str, ...]) -> Decision:
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
    faster, because = _faster(hardware, strategy, devices)
    kept = "the policy that is set; another would change the results"
    if faster is None or current != "float32":
        evidence = because if faster is None else f"it isn't float32, the one that {faster} would replace"
        return Decision(name, current, kept, evidence, 'precision="mixed_bfloat16"')
    return Decision(name, current, kept, f"{faster} would be faster: {because}", f'precision="{faster}"')


def _kind(hardware: Hardware, devices: tuple[str, ...]) -> str:
    """The kind of device that trains; a strategy that was passed is assumed to use the GPUs, if there are any."""
    return kind_of_device(devices[0]) if devices else "GPU" if hardware.of_kind("GPU") else "CPU"


def _faster(hardware: Hardware, strategy: str, devices: tuple[str, ...]) -> tuple[str | None, str]:
    """The policy that the devices have units for, or `None`, and the evidence."""
    if strategy == "tpu":
        return faster_policy("TPU")
    used = [gpu for gpu in hardware.of_kind("GPU") if not devices or gpu.name in devices]
    return faster_policy("GPU" if used else "CPU", [gpu.compute_capability for gpu in used])


def _caution(policy: str | None, hardware: Hardware) -> str:
    if policy == "mixed_float16" and hardware.tpus:
        return "a TPU has no units for float16; use mixed_bfloat16"
    if policy in ("mixed_float16", "mixed_bfloat16") and not hardware.of_kind("GPU") and not hardware.tpus:
        return "there is no GPU or TPU here: it saves memory at most"
    return "results differ from those of float32" if policy != "float32" else ""
