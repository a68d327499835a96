"""Times steps of `fit` by turns."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from harness import interleaved, timed_fit
from models import endless

from gpu_parts.case import Machine
from gpu_parts.models import data_for, loss, made

ROUNDS = 5
# Batches are cut into as many parts.
PARTS = 4
# The sizes of the models and the rows of their batches that fill a card of this memory, and those of the small form.
CARD = 79 * 2**30
SIZES: dict[str, tuple[tuple[dict[str, int], int], tuple[dict[str, int], int]]] = {
    "MLP": (({"width": 4096}, 8192), ({"width": 32}, 16)),
    "CNN": (({"width": 128, "size": 32, "blocks": 4}, 512), ({"width": 4, "size": 8}, 8)),
    "Transformer": (
        ({"width": 768, "tokens": 512, "blocks": 12, "heads": 12, "words": 8192}, 16),
        ({"width": 8, "tokens": 6}, 8),
    ),
}


def sized(machine: Machine, name: str) -> tuple[keras.Model, int]:
    """A model and the rows of a batch that fill the card; or small ones."""
    sizes, rows = machine.size(*SIZES[name])
    share = min(1, (machine.memory_bytes or CARD) / CARD)
    return made(name, **sizes), rows if machine.cpu else max(PARTS, int(rows * share) // PARTS * PARTS)


def compiled(machine: Machine, model: keras.Model, by: Any, jit: bool | str = "auto") -> keras.Model:
    """The model to be timed."""
    model.compile(by, loss(), jit_compile=False if machine.cpu else jit, run_eagerly=machine.eager)
    return model


def large(machine: Machine) -> str:
    """The name of the largest model, which the small form does without."""
    return machine.size("Transformer", "MLP")


def batches(model: keras.Model, rows: int) -> tf.data.Dataset:
    """One batch for ever, on the device."""
    x, y, _ = data_for(model, rows)
    return endless(x, y)


def by_turns(
    machine: Machine,
    fits: dict[str, tuple[keras.Model, Any, Sequence[keras.callbacks.Callback]]],
    steps: int = 20,
) -> dict[str, float]:
    """The median milliseconds of a step of each `fit`, which take turns.

    Args:
        machine: Where it runs.
        fits: By name, a compiled model, its batches, and callbacks.
        steps: How many steps a turn has on a GPU.
    """
    steps = machine.size(steps, 2)
    runs: dict[str, Callable[[], float]] = {
        name: timed_fit(model, data, steps, steps, callbacks) for name, (model, data, callbacks) in fits.items()
    }
    return interleaved(runs, machine.size(ROUNDS, 1), warm_up=1)


def ratios_in_words(took: dict[str, float]) -> str:
    """What each takes, in the time of the first."""
    (first, base), *others = took.items()
    shown = ", ".join(f"{name} {milliseconds / base:.2f}" for name, milliseconds in others)
    return f"{shown} of {first}, {base:.2f} ms"


def milliseconds_of_steps(machine: Machine, ways: dict[str, tuple[str, bool]]) -> dict[str, float]:
    """The milliseconds of a step of the MLP in each precision, with XLA or without."""
    fits = {}
    for name, (policy, jit) in ways.items():
        keras.config.set_dtype_policy(policy)
        model, rows = sized(machine, "MLP")
        fits[name] = compiled(machine, model, "adam", jit), batches(model, rows), ()
    keras.config.set_dtype_policy("float32")
    return by_turns(machine, fits)
