"""Private training in Keras on JAX, by JAX-Privacy; see `privacy.py`, which runs this.

Prints a JSON line for each model: milliseconds a plain step of `fit`, and how many times that a private one takes.
"""

import json
import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
from jax_privacy import keras_api
from models import batch_of, loss_of, model_of
from peers.ratios import in_plain

# Few, as a private step of the perceptron takes seconds.
SIZE, UPDATES, EPOCHS, ROUNDS = 1024, 8, 1, 3


def timed(model, data, **options):
    model.compile(keras.optimizers.SGD(0.01), loss_of())

    def run():
        start = time.perf_counter()
        model.fit(*data, epochs=EPOCHS, verbose=0, **options)
        return (time.perf_counter() - start) / (UPDATES * EPOCHS) * 1e3

    return run


def private(model):
    """With batches of a fixed size, computed in four parts."""
    settings = keras_api.DPKerasConfig(
        epsilon=1e6,
        delta=1e-6,
        clipping_norm=1.0,
        batch_size=SIZE,
        gradient_accumulation_steps=1,
        train_steps=UPDATES * EPOCHS * (ROUNDS + 2),
        train_size=SIZE * UPDATES,
        noise_multiplier=1.0,
        rescale_to_unit_norm=False,
        microbatch_size=SIZE // 4,
        seed=0,
    )
    return keras_api.make_private(model, settings)


def main():
    for name in ("mlp", "cnn", "transformer"):
        data = batch_of(name, SIZE * UPDATES)
        cases = {
            "plain": timed(model_of(name), data, batch_size=SIZE),
            "private": timed(private(model_of(name)), data, batch_size=SIZE),
        }
        plain, ratios = in_plain(cases, ROUNDS)
        print(json.dumps({"model": name, "examples": SIZE, "plain": plain, "ratio": ratios["private"]}), flush=True)


if __name__ == "__main__":
    main()
