"""Private updates: the noise's deviation, and what one example can change."""

import keras
import numpy as np

from gpu_parts.case import FAILS, HOLDS, Cases, Line, Machine
from gpu_parts.models import data_for, loss, made
from gpu_parts.right import XLA
from keras_paragrad.privacy import make_private

NOISE, CLIP, SIZE, WIDTH, UPDATES = 0.7, 0.5, 8, 400, 10
cases = Cases()


@cases("make_private, the noise's deviation{}", variants=XLA)
def noise(machine: Machine, jit: bool) -> Line:
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(WIDTH)])
    private = make_private(model, clip_norm=CLIP, noise_multiplier=NOISE, expected_batch_size=SIZE, delta=1e-3, seed=0)
    # In units of the noise, and of a gradient that is zero.
    private.compile(keras.optimizers.SGD(SIZE / (NOISE * CLIP)), "mse", jit_compile=jit)
    rows = SIZE * UPDATES
    before = model.get_weights()[0]
    private.fit(np.zeros((rows, 50)), np.zeros((rows, WIDTH)), sample_weight=np.zeros(rows), verbose=0)
    moved = (model.get_weights()[0] - before).ravel() / np.sqrt(private.privacy.updates)
    deviation, allowed = float(moved.std()), 5 / np.sqrt(2 * moved.size)
    text = f"{deviation:.4f} of what is claimed, which {moved.size} draws show within {allowed:.4f}"
    return Line(text, HOLDS if abs(deviation - 1) < allowed else FAILS, {"deviation": deviation, "allowed": allowed})


@cases("make_private, what one example changes{}", variants=XLA)
def sensitivity(machine: Machine, jit: bool) -> Line:
    sums = [weights_after(present, jit, eager=machine.eager) for present in (0.0, 1.0)]
    changed = float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(*sums, strict=True)))) * SIZE
    limit = CLIP * (1 + 1e-5) + SIZE * 1e-6
    text = f"the clipped sum by {changed:.6f}, of the clip norm {CLIP}"
    return Line(text, HOLDS if 0 < changed <= limit else FAILS, {"changed": changed, "limit": limit})


def weights_after(present: float, jit: bool, eager: bool) -> list[np.ndarray]:
    """The weights after an update of all rows, with the last or without it, and noise below rounding."""
    model = made("MLP")
    x, y, _ = data_for(model, SIZE)
    x[-1] *= 100
    private = make_private(model, clip_norm=CLIP, noise_multiplier=1e-9, expected_batch_size=SIZE, delta=1e-3, seed=0)
    private.compile(keras.optimizers.SGD(1.0), loss(), jit_compile=jit and not eager, run_eagerly=eager)
    private.fit(x, y, sample_weight=np.array([1.0] * (SIZE - 1) + [present]), verbose=0)
    return model.get_weights()
