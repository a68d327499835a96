"""What accumulation takes, against Keras's own and the bare gradient: milliseconds a micro-batch."""

import logging

import keras
from accumulation import BareGradient

from gpu_parts.case import MEASURED, Cases, Line, Machine
from gpu_parts.timing import batches, by_turns, compiled, ratios_in_words, sized
from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

# How many micro-batches make an update.
OF_STEPS = {f"{name}, k={steps}": {"name": name, "steps": steps} for name in ("MLP", "CNN") for steps in (4, 16)}
cases = Cases()


@cases("accumulation with Adam: {}", 120, OF_STEPS)
def accumulates(machine: Machine, name: str, steps: int, policy: str = "float32") -> Line:
    # The optimizer used with its callback says nothing; Keras's is used alone.
    logging.getLogger("keras_paragrad").setLevel(logging.ERROR)
    keras.config.set_dtype_policy(policy)
    ways = {
        "the bare gradient": (BareGradient(), ()),
        "Keras": (keras.optimizers.Adam(gradient_accumulation_steps=steps), ()),
        "AccumulatingOptimizer": (AccumulatingOptimizer(keras.optimizers.Adam(), steps), (ExactAccumulation(),)),
    }
    fits = {}
    for way, (by, callbacks) in ways.items():
        model, rows = sized(machine, name)
        fits[way] = compiled(machine, model, by), batches(model, rows), callbacks
    keras.config.set_dtype_policy("float32")
    # A window closes as often in every turn.
    took = by_turns(machine, fits, steps=16)
    return Line(ratios_in_words(took), MEASURED, {"milliseconds": took})
