"""What norms, clipped and private updates take, against plain ones, with SGD."""

import keras
import numpy as np

from gpu_parts.case import MEASURED, Cases, Line, Machine
from gpu_parts.models import data_for
from gpu_parts.timing import batches, by_turns, compiled, ratios_in_words, sized
from keras_paragrad import wrap
from keras_paragrad.privacy import make_private

# A private epoch has so many updates.
UPDATES = 16
cases = Cases()


@cases("norms and clipped updates: {}", 120, {name: {"name": name} for name in ("MLP", "CNN")})
def per_example(machine: Machine, name: str) -> Line:
    fits = {}
    for way, options in {"plain": None, "norms": {"quantity": "norms"}, "clipped": {"clip_norm": 1.0}}.items():
        model, rows = sized(machine, name)
        data = batches(model, rows)
        model = model if options is None else wrap(model, **options)
        fits[way] = compiled(machine, model, keras.optimizers.SGD(0.01)), data, ()
    took = by_turns(machine, fits, steps=10)
    return Line(ratios_in_words(took), MEASURED, {"milliseconds": took})


@cases("private updates: {}", 120, {name: {"name": name} for name in ("MLP", "CNN")})
def private(machine: Machine, name: str) -> Line:
    updates = machine.size(UPDATES, 2)
    fits = {}
    for way in ("plain", "private"):
        model, rows = sized(machine, name)
        x, y, _ = data_for(model, rows * updates)
        if way == "private":
            model = make_private(
                *(model,),
                clip_norm=1.0,
                noise_multiplier=1.0,
                expected_batch_size=rows,
                delta=1e-6,
                physical_batch_size=rows,
                examples=len(x),
            )
        fits[way] = compiled(machine, model, keras.optimizers.SGD(0.01)), (x, y, rows)
    took = private_by_turns(machine, fits, updates)
    return Line(ratios_in_words(took), MEASURED, {"milliseconds": took})


def private_by_turns(machine: Machine, fits: dict, updates: int) -> dict[str, float]:
    """The median milliseconds of an update, each `fit` an epoch of arrays: what is private takes nothing else."""
    import time

    from harness import interleaved

    def timed(model: keras.Model, x: np.ndarray, y: np.ndarray, rows: int):
        options = {} if hasattr(model, "privacy") else {"batch_size": rows}

        def run() -> float:
            began = time.perf_counter()
            model.fit(x, y, verbose=0, **options)
            return (time.perf_counter() - began) / updates * 1e3

        return run

    runs = {name: timed(model, *data) for name, (model, data) in fits.items()}
    return interleaved(runs, machine.size(5, 1), warm_up=1)
