"""Decides the precision."""

import keras

from keras_paragrad.distribution.decisions.decision import Decision
from keras_paragrad.distribution.gains import faster_policy
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options

NAME = "precision"


def decide_precision(hardware: Hardware, options: Options, strategy: str, devices: tuple[str, ...]) -> Decision:
    """Keeps the dtype policy that is set, unless another was asked for: a faster one would change the results."""
    current = keras.config.dtype_policy().name
    if options.precision not in (None, "auto"):
        return Decision(NAME, options.precision, "asked for", _caution(options.precision, hardware), "precision=None")
    if options.precision is None:
        return Decision(
            NAME, current, "the policy that is set", "precision=None asks for no advice", 'precision="auto"'
        )
    faster, because = _faster(hardware, strategy, devices)
    kept = "the policy that is set; another would change the results"
    if faster is None or current != "float32":
        evidence = because if faster is None else f"it isn't float32, which {faster} would replace"
        return Decision(NAME, current, kept, evidence, 'precision="mixed_bfloat16"')
    return Decision(NAME, current, kept, f"{faster} would be faster: {because}", f'precision="{faster}"')


def _faster(hardware: Hardware, strategy: str, devices: tuple[str, ...]) -> tuple[str | None, str]:
    """The policy that the devices have units for, if they do, and how that is known."""
    if strategy == "tpu":
        return faster_policy("TPU")
    used = [gpu for gpu in hardware.of_kind("GPU") if not devices or gpu.name in devices]
    return faster_policy("GPU" if used else "CPU", [gpu.compute_capability for gpu in used])


def _caution(policy: str | None, hardware: Hardware) -> str:
    if policy == "mixed_float16" and hardware.tpus:
        return "a TPU has no units for float16; mixed_bfloat16 suits it"
    if policy in ("mixed_float16", "mixed_bfloat16") and not hardware.of_kind("GPU") and not hardware.tpus:
        return "there is no GPU or TPU here: it saves memory at most"
    return "results differ from those of float32" if policy != "float32" else ""
