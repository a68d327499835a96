"""Decides whether the result must be that of one device."""

from keras_paragrad.distribution.decisions.decision import Decision
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options


def decide_exact(hardware: Hardware, options: Options, strategy: str) -> Decision:
    """Keeps the promise, or has the user give it up.

    Raises:
        ValueError: The strategy can't keep it, and it wasn't given up.
    """
    if strategy == "parameter_server":
        if options.exact:
            raise ValueError(
                "Parameter servers are asynchronous: a gradient is applied to weights that others have changed, so the "
                "answer can't be that of one device. Write exact=False with them, or start the cluster without the job "
                '"ps".'
            )
        return Decision("exact", False, "asked for", "parameter servers are asynchronous", 'strategy="none"')
    if not options.exact:
        return Decision("exact", False, "asked for", "Keras's own step is left as it is", "exact=True")
    reason = "uneven batches, clips, weights and non-finite gradients count as on one device"
    evidence = "the tests compare with one device on the whole batch"
    if hardware.of_kind("GPU") or hardware.tpus:
        evidence += "; they run on CPUs, and have not been run on this kind of device"
    return Decision("exact", True, reason, evidence, "exact=False")
