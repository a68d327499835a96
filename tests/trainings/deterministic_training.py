"""Trains one of several kinds of models deterministically in a world, and returns its digest and history."""

import contextlib
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch
from keras_paragrad.distribution.digest import Digest, digest_of

layers = keras.layers
# No multiple of the batch size; the last batch has fewer rows than twice the parts.
ROWS, BATCH_SIZE = 139, 64


def build_model(kind: str) -> keras.Model:
    if kind == "dense":
        inputs = keras.Input((6,))
        x = layers.Dropout(0.3)(layers.Dense(16, activation="tanh", kernel_regularizer="l2")(inputs))
    elif kind == "convolutions":
        inputs = keras.Input((8, 8, 3))
        x = layers.GroupNormalization(4)(layers.Conv2D(8, 3, activation="relu")(inputs))
        x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3)(x)))
    elif kind == "recurrent":
        inputs = keras.Input((7,), dtype="int32")
        x = layers.LSTM(8)(layers.Embedding(20, 8, mask_zero=True)(inputs))
    else:
        inputs = keras.Input((7,), dtype="int32")
        x = layers.Embedding(20, 16)(inputs)
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x))
        x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(5)(x))


def compile_model(model: keras.Model, optimizer: Any = None) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def make_data(kind: str) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 5, ROWS)
    if kind in ("convolutions", "dense"):
        shape = (8, 8, 3) if kind == "convolutions" else (6,)
        return draw.normal(size=(ROWS, *shape)).astype("float32"), labels
    return draw.integers(0, 20, (ROWS, 7)).astype("int32"), labels


def train(
    dist: DistributedFit | int,
    kind: str,
    make_optimizer: Any = None,
    *,
    windows: int = 0,
    seed: int = 1,
    prepared: bool = False,
    validated: bool = False,
    callbacks: Any = (),
) -> tuple[Digest, dict[str, list[float]]]:
    """Trains in a world, or on one device in slices, of which every batch has so many."""
    with dist.scope() if isinstance(dist, DistributedFit) else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        optimizer = make_optimizer() if make_optimizer else keras.optimizers.Adam(0.01)
        model = compile_model(build_model(kind), AccumulatingOptimizer(optimizer, windows) if windows else optimizer)
    x, y = make_data(kind)
    accumulates = windows or isinstance(model.optimizer, AccumulatingOptimizer)
    callbacks = [*([ExactAccumulation()] if accumulates else []), *callbacks]
    options: dict[str, Any] = {"batch_size": BATCH_SIZE // (4 if windows else 1), "epochs": 2, "verbose": 0}
    options |= {"callbacks": callbacks, "validation_data": (x[:21], y[:21]) if validated else None}
    if not isinstance(dist, DistributedFit):
        # Keras shuffles in an order of its own.
        order = [np.random.default_rng((1, epoch)).permutation(ROWS) for epoch in range(2)]
        microbatch(model, BATCH_SIZE, deterministic=dist)
        history: dict[str, list[float]] = {}
        for epoch, rows in enumerate(order):
            settings = {**options, "epochs": epoch + 1, "initial_epoch": epoch, "shuffle": False}
            found = model.fit(x[rows], y[rows], **settings).history
            history = {name: [*history.get(name, []), *values] for name, values in found.items()}
        return digest_of(model), history
    if prepared:
        dist.prepare(model)
        return digest_of_run(model, model.fit(x, y, **options))
    return digest_of_run(model, dist.fit(model, x, y, seed=seed, **options))


def digest_of_run(model: keras.Model, history: keras.callbacks.History) -> tuple[Digest, dict[str, list[float]]]:
    return digest_of(model), history.history


class Interrupt(keras.callbacks.Callback):
    """Ends the process after so many batches."""

    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt


def train_in_world(task: dict[str, Any]) -> dict[str, Any] | None:
    """Trains in a process of its own, on several of its devices or as one of several workers; `None`: interrupted."""
    replicas = task.get("replicas", 1)
    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * replicas)
    options = {"shard": task["shard"], "min_shard_bytes": 1} if task.get("shard") and replicas > 1 else {}
    devices = [f"CPU:{index}" for index in range(replicas)]
    if "TF_CONFIG" in os.environ or replicas > 1:
        dist = DistributedFit(devices=devices, deterministic=True, **options)
    else:
        dist = DistributedFit("none", deterministic=True)
    callbacks = []
    if task.get("backups"):
        callbacks += dist.callbacks(task["backups"], every=1, delete_when_done=False)
    if task.get("interrupt_after"):
        callbacks.append(Interrupt(task["interrupt_after"]))
    try:
        settings = {"windows": task.get("windows", 0), "validated": task.get("validated", False)}
        digest, history = train(dist, task["kind"], callbacks=callbacks, **settings)
    except KeyboardInterrupt:
        return None
    return {"digest": list(digest[:3]), "history": history}
