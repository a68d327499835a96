"""Where XLA and 16-bit precision pay off, by kind of device; used by the plan and the profiler's advice."""

from collections.abc import Sequence

XLA_ON_CPUS = "on CPUs, XLA runs convolutions in a loop on one core"


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

    >>> from keras_paragrad.distribution.gains import faster_policy
    >>> faster_policy("GPU", [(8, 0), (7, 5)])[0]
    'mixed_float16'
    """
    if kind == "TPU":
        return "mixed_bfloat16", "a TPU multiplies in bfloat16"
    if kind != "GPU":
        return None, "CPUs are not known to gain from another one"
    known = [each for each in capabilities if each is not None]
    if not known or len(known) < len(capabilities):
        return None, "the GPU's compute capability is not known"
    least = min(known)
    said = f"compute capability {least[0]}.{least[1]}"
    if least >= (8, 0):
        return "mixed_bfloat16", f"{said} has tensor cores for it, and it needs no loss scaling"
    if least >= (7, 0):
        return "mixed_float16", f"{said} has tensor cores for it; it needs loss scaling"
    return None, f"{said} has no tensor cores"
