"""Trains a character GPT on a 2 x 2 mesh: each batch in two parts, each weight matrix in two parts.

    python examples/gpt_hybrid.py [FOLDER]

The text is Python's own documentation, which ships with it. Gradients are accumulated over two batches, blocks run
again in the backward pass instead of keeping their activations, and the folder gets traces, tables and a report. The
layout of the weights is found from the model, and printed. Four logical CPU devices stand in for GPUs; it takes about
three minutes.
"""

import os
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, recompute
from keras_paragrad.profiling import GradientTelemetry, Profiler, ProfileSchedule, Throughput, write_report

MESH = {"batch": 2, "model": 2}
TOKENS, WIDTH, HEADS, BLOCKS = 64, 128, 4, 2
BATCH_SIZE, STEPS, WINDOWS, EPOCHS = 32, 2, 4096, 5
PROMPT, LENGTH, TEMPERATURE = "The statement ", 200, 0.5


class Positions(keras.layers.Layer):
    """Adds a vector for each position of a sequence."""

    def build(self, shape):
        """Makes the vectors."""
        self.vectors = self.add_weight(shape=shape[1:], initializer="normal", name="vectors")

    def call(self, inputs):
        """Adds them."""
        return inputs + self.vectors


def gpt(characters: int) -> keras.Model:
    """Predicts each next character; embeddings are tied to the output."""
    layers = keras.layers
    embedding = layers.ReversibleEmbedding(characters, WIDTH, name="characters")
    inputs = keras.Input((TOKENS,), dtype="int32")
    hidden = Positions(name="positions")(embedding(inputs))
    for block in range(BLOCKS):
        normal = layers.LayerNormalization(name=f"before_attention_{block}")(hidden)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{block}")
        hidden = layers.Add(name=f"attended_{block}")([hidden, attention(normal, normal, use_causal_mask=True)])
        normal = layers.LayerNormalization(name=f"before_dense_{block}")(hidden)
        inner = layers.Dense(4 * WIDTH, activation="gelu", name=f"wide_{block}")(normal)
        hidden = layers.Add(name=f"block_{block}")([hidden, layers.Dense(WIDTH, name=f"narrow_{block}")(inner)])
    return keras.Model(inputs, embedding(layers.LayerNormalization(name="last")(hidden), reverse=True), name="gpt")


def load() -> tuple[np.ndarray, list[str]]:
    """The text as numbers, and the characters that they stand for."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    return np.array([numbers[character] for character in text], "int32"), characters


def sample(model: keras.Model, characters: list[str]) -> str:
    """Writes on after the prompt."""
    text, random = PROMPT, np.random.default_rng(0)
    for _ in range(LENGTH):
        last = text[-TOKENS:]
        given = np.array([[characters.index(each) for each in last.ljust(TOKENS)]] * MESH["batch"])
        scores = model.predict(given, verbose=0)[0, len(last) - 1] / TEMPERATURE
        chances = np.exp(scores - scores.max(), dtype="float64")
        text += characters[random.choice(len(chances), p=chances / chances.sum())]
    return text


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.mkdtemp(prefix="gpt_hybrid_"))
    devices = [f"CPU:{index}" for index in range(MESH["batch"] * MESH["model"])]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(devices))

    text, characters = load()
    starts = np.random.default_rng(0).integers(0, len(text) - TOKENS, WINDOWS)
    windows = text[starts[:, np.newaxis] + np.arange(TOKENS + 1)]

    keras.utils.set_random_seed(0)
    dist = DistributedFit(mesh=MESH, layout="auto", devices=devices)
    with dist.scope():
        model = gpt(len(characters))
        optimizer = keras.optimizers.AdamW(4e-3, global_clipnorm=1.0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(AccumulatingOptimizer(optimizer, steps=STEPS), loss, metrics=["accuracy"])
    recompute(model, every=1)
    dist.prepare(model)
    print(dist.explain())

    callbacks = [
        ExactAccumulation(),
        GradientTelemetry(folder),
        Throughput(folder),
        Profiler(folder, ProfileSchedule(skip_first=WINDOWS // BATCH_SIZE, warmup=2, active=8), on_signal=None),
    ]
    dist.fit(
        model, windows[:, :-1], windows[:, 1:], batch_size=BATCH_SIZE, epochs=EPOCHS, callbacks=callbacks, verbose=2
    )
    print(sample(model, characters))
    print(f"Report: {write_report(folder)}")


if __name__ == "__main__":
    main()
