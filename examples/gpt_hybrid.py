"""Trains a character GPT on a 2 x 2 mesh: each batch in two parts, each weight matrix in two parts.

    python examples/gpt_hybrid.py

The text is Python's own documentation, which ships with it. Gradients are accumulated over two batches, blocks run
again in the backward pass instead of keeping their activations, and the folder gets traces, tables and a report. The
layout of the weights is found from the model, and printed. Four logical CPU devices stand in for GPUs. It takes three
minutes on two CPU cores.
"""

import time
from pydoc_data.topics import topics

from _example import Progress, options, require

require("xprof")

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


def sample(model: keras.Model, characters: list[str], length: int, progress: Progress) -> str:
    """Writes on after the prompt."""
    text, random = PROMPT, np.random.default_rng(0)
    for _ in range(length):
        last = text[-TOKENS:]
        given = np.array([[characters.index(each) for each in last.ljust(TOKENS)]] * MESH["batch"])
        scores = model.predict(given, verbose=0)[0, len(last) - 1] / TEMPERATURE
        chances = np.exp(scores - scores.max(), dtype="float64")
        text += characters[random.choice(len(chances), p=chances / chances.sum())]
        progress.advance()
    return text


def main() -> None:
    """Trains, writes a text, and shows where the time went."""
    given = options(__doc__, takes="three minutes")
    count, epochs, length = (4 * BATCH_SIZE, 2, 5) if given.short else (WINDOWS, EPOCHS, LENGTH)
    folder = given.folder / time.strftime("%Y%m%d-%H%M%S")
    devices = [f"CPU:{index}" for index in range(MESH["batch"] * MESH["model"])]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(devices))

    text, characters = load()
    starts = np.random.default_rng(0).integers(0, len(text) - TOKENS, count)
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

    batches = count // BATCH_SIZE
    schedule = ProfileSchedule(skip_first=batches, warmup=min(2, batches // 2), active=min(8, batches // 2))
    callbacks = [
        ExactAccumulation(),
        GradientTelemetry(folder),
        Throughput(folder),
        Profiler(folder, schedule),
    ]
    with Progress("Training", epochs * batches) as progress:
        callbacks.append(progress.callback())
        x, y = windows[:, :-1], windows[:, 1:]
        dist.fit(model, x, y, batch_size=BATCH_SIZE, epochs=epochs, callbacks=callbacks, verbose=2)
    with Progress("Writing", length, "characters") as progress:
        written = sample(model, characters, length, progress)
    with Progress("The report"):
        report = write_report(folder)
    print(f"The character GPT, trained on {len(devices)} devices, goes on after {PROMPT!r}:\n{written}")
    print("The report shows where the time of its steps went, and the gradients of its layers.")
    print(f"The report, to open in a browser: {report}")


if __name__ == "__main__":
    main()
