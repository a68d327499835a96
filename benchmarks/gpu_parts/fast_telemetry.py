"""What telemetry takes, against plain steps."""

from gpu_parts.case import MEASURED, Cases, Line, Machine
from gpu_parts.timing import batches, by_turns, compiled, ratios_in_words, sized
from keras_paragrad import GradientTelemetry

cases = Cases()


@cases("telemetry: {}", 90, {name: {"name": name} for name in ("MLP", "CNN")})
def telemetry(machine: Machine, name: str) -> Line:
    ways = {
        "plain": (),
        "every step": (GradientTelemetry(every=1),),
        "every 100": (GradientTelemetry(every=machine.size(100, 2)),),
    }
    fits = {}
    for way, callbacks in ways.items():
        model, rows = sized(machine, name)
        fits[way] = compiled(machine, model, "adam"), batches(model, rows), callbacks
    took = by_turns(machine, fits, steps=100 if name == "MLP" else 20)
    return Line(ratios_in_words(took), MEASURED, {"milliseconds": took})
