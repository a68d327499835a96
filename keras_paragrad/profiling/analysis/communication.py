"""How much of the time of collectives is hidden behind computing."""

from keras_paragrad.profiling.analysis.events import NANOSECONDS, Coverage, Trace
from keras_paragrad.profiling.analysis.steps import overlaps
from keras_paragrad.profiling.summary import Communication


def communication(trace: Trace) -> Communication | None:
    """How long collectives take in a trace's steps, summed over devices, in all and hidden; `None` without any.

    Where GPUs or TPUs have collectives, the hidden part is the time in which the same device computes. Collectives of
    the host are hidden by what any device of this process computes.
    """
    steps, collectives, computing = overlaps(trace)
    devices = trace.device_collectives
    if devices:
        pairs = [
            (Coverage(spans) & Coverage(steps), Coverage(trace.device_compute[name])) for name, spans in devices.items()
        ]
    else:
        pairs = [(Coverage(collectives), Coverage(trace.device) | computing)]
    total = sum(in_collectives.total for in_collectives, _ in pairs)
    hidden = sum((in_collectives & in_compute).total for in_collectives, in_compute in pairs)
    return Communication(total / NANOSECONDS, hidden / NANOSECONDS) if total else None
