"""What accumulation costs: beside the bare gradient, Keras's own accumulation and one large batch.

`python benchmarks/accumulation.py` prints the tables and saves them in `results/accumulation.json`.
"""

import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# As `harness` does, which is imported after TensorFlow here.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import tensorflow as tf
from harness import interleaved, report, timed_fit
from models import endless

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

WIDTH, LAYERS, MICRO_BATCH = 1500, 4, 64
VOCABULARY, EMBEDDING, WORDS = 300_000, 32, 20
# One case uses the optimizer without its callback, about which it logs a message.
logging.getLogger("keras_paragrad").setLevel(logging.ERROR)


class BareGradient(keras.optimizers.Optimizer):
    """Stores the gradient and updates nothing, which is the least that a step can cost."""

    def __init__(self):
        super().__init__(learning_rate=0.0)
        self.gradients = []

    def build(self, variables):
        self.gradients = [self.add_variable_from_reference(variable, name="gradient") for variable in variables]
        super().build(variables)

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(list(trainable_variables))
        for kept, gradient in zip(self.gradients, grads, strict=True):
            kept.assign(tf.convert_to_tensor(gradient))


def dense_model(optimizer, jit_compile=False):
    """Nine million parameters in four dense layers."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    return model


def dense_data(rows):
    generator = np.random.default_rng(0)
    x, y = (generator.normal(size=(rows, WIDTH)).astype("float32") for _ in range(2))
    return endless(x, y)


def sparse_model(optimizer, jit_compile=False):
    """An embedding of 300,000 words, 32 wide."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((WORDS,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, EMBEDDING),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    return model


def sparse_data(rows):
    generator = np.random.default_rng(0)
    x = generator.integers(0, VOCABULARY, (rows, WORDS)).astype("int32")
    return endless(x, generator.normal(size=(rows, 1)).astype("float32"))


def adam(**arguments):
    return keras.optimizers.Adam(1e-4, **arguments)


def compare(build, data, k, jit_compile, micro_batch, micro_batches, rounds):
    """Milliseconds per micro-batch of each way to take the same updates, with `k` micro-batches in one.

    `build` makes a model of an optimizer, and `data` makes batches of a number of rows.
    """
    small = data(micro_batch)

    def case(optimizer, callbacks=()):
        return timed_fit(build(optimizer, jit_compile), small, micro_batches, micro_batches, callbacks)

    large = timed_fit(build(adam(), jit_compile), data(micro_batch * k), micro_batches // k, micro_batches)
    return interleaved(
        {
            "bare gradient": case(BareGradient()),
            "built-in": case(adam(gradient_accumulation_steps=k)),
            "in the graph": case(AccumulatingOptimizer(adam(), k)),
            "ExactAccumulation": case(AccumulatingOptimizer(adam(), k), [ExactAccumulation()]),
            "one large batch": large,
        },
        rounds,
    )


def speed(title, build, data, settings, micro_batch, micro_batches, rounds=5):
    """Reports what `compare` measures for each setting, a pair of `jit_compile` and `k`."""
    rows = []
    for jit_compile, k in settings:
        took = compare(build, data, k, jit_compile, micro_batch, micro_batches, rounds)
        ours = took["ExactAccumulation"]
        rows.append(
            [
                f"jit {'on' if jit_compile else 'off'}, k={k}",
                *took.values(),
                ours / took["built-in"],
                ours / took["bare gradient"],
            ]
        )
    names = ["bare gradient", "built-in", "in the graph", "ExactAccumulation", "one large batch"]
    report("accumulation", title, ["", *names, "to built-in", "to bare gradient"], rows)


def main():
    settings = [(True, 4), (True, 16), (False, 4), (False, 16)]
    speed(
        f"Milliseconds a micro-batch of {MICRO_BATCH}: dense, 9M parameters, Adam",
        dense_model,
        dense_data,
        settings,
        MICRO_BATCH,
        48,
    )
    speed(
        "Milliseconds a micro-batch of 32: embedding of 300,000 x 32, Adam",
        sparse_model,
        sparse_data,
        [(True, 16), (False, 4), (False, 16)],
        32,
        48,
    )


if __name__ == "__main__":
    main()
