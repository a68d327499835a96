"""The Transformer of `mesh.py` on Keras's meshes of JAX's devices; see `mesh.py`, which runs this.

Prints a JSON line: milliseconds a step, by case.
"""

import json
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import keras
from harness import interleaved
from mesh import ALONE, MESHES, ROUNDS, STEPS, alone, batches, distribution, timed
from sharding import BATCH


def training(shape):
    """Takes steps of a model, with Keras's own distribution, which is one for the process."""
    found = None if shape is None else distribution(shape)
    keras.distribution.set_distribution(found)
    model, data = alone(True), batches(STEPS)

    def fit():
        keras.distribution.set_distribution(found)
        model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)

    return fit


if __name__ == "__main__":
    cases = {name: timed(training(shape)) for name, shape in {ALONE: None, **MESHES}.items()}
    print(json.dumps(interleaved(cases, ROUNDS)))
