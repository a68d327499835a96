"""Decides whether XLA compiles the training step, and which part of it."""

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision
from keras_paragrad.distribution.gains import XLA_ON_CPUS, gains_from_xla
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.names import kind_of_device
from keras_paragrad.distribution.options import Options

NAME = "jit"
ACROSS = "XLA can't compile a step across devices: it fails on Mirrored, and is refused with the ring"


def compiled_form(strategy: str, replicas: int | None) -> str:
    """How a model that is compiled with `jit_compile=True` trains.

    Args:
        strategy: The strategy's kind, as in the plan.
        replicas: How many step together.

    Returns:
        `"whole_step"`, `"per_replica"` (forward and backward, with the reduction and the update outside), or `"none"`
        where XLA can't.
    """
    if strategy == "parameter_server":
        return "none"
    return "whole_step" if strategy in ("none", "one_device", "tpu") or replicas == 1 else "per_replica"


def decide_jit(
    hardware: Hardware, options: Options, strategy: str, devices: tuple[str, ...], replicas: int | None
) -> Decision:
    """Decides what becomes of a model whose `jit_compile` is Keras's own `"auto"`.

    Raises:
        ValueError: What was asked for can't be had.
    """
    form, asked = compiled_form(strategy, replicas), options.jit
    evidence = ACROSS if form == "per_replica" else "one program on one device"
    if strategy == "tpu":
        if asked is False:
            raise ValueError("jit=False, but a TPU runs nothing that XLA has not compiled. Leave jit out.")
        return Decision(NAME, form, "a TPU runs nothing else", "TensorFlow's TPU runtime is XLA", NO_CHOICE)
    if form == "none":
        if asked is True:
            raise ValueError(
                "jit=True, but XLA can't compile a step whose variables lie on parameter servers. Leave jit out."
            )
        return Decision(
            NAME, form, "variables lie in other processes", "XLA needs them on its device", 'strategy="none"'
        )
    if asked is True:
        return Decision(NAME, form, "asked for", evidence, "jit=False")
    if asked is False:
        return Decision(NAME, "none", "asked for", evidence, "jit=True")
    if not gains_from_xla(_kind(hardware, devices)):
        reason = f'Keras\'s "auto" leaves CPUs alone; jit_compile=True in compile() still holds, as {form}'
        return Decision(NAME, "none", reason, XLA_ON_CPUS, "jit=True")
    reason = "what Keras does on one such device" + (", on each replica" if form == "per_replica" else "")
    return Decision(NAME, form, reason, evidence, "jit=False")


def _kind(hardware: Hardware, devices: tuple[str, ...]) -> str:
    """On what training runs; a strategy that was handed over is taken to use what GPUs there are."""
    return kind_of_device(devices[0]) if devices else "GPU" if hardware.of_kind("GPU") else "CPU"
