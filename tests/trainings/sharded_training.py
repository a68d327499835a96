"""Models trained in shards, in processes that have the devices for it, and by Keras on one device."""

import contextlib
import functools
import gc
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

from keras_paragrad import AccumulatingOptimizer, DistributedFit, microbatch, recompute
from keras_paragrad.engine.step.apply import apply_gradient
from keras_paragrad.storage.sharded import sharded_value
from keras_paragrad.storage.updating import install_storages

VOCABULARY, LENGTH = 80, 6
# All but the last are cut; biases of a few bytes too.
LEAST_BYTES = 64
RATE = 0.1


class Case(NamedTuple):
    """How to train."""

    model: str
    optimizer: str
    shard: str
    settings: tuple[str, ...] = ()


def mlp() -> keras.Model:
    inputs = keras.Input((16,))
    constraint = keras.constraints.MaxNorm(1.0)
    hidden = layers.Dense(24, "tanh", kernel_regularizer="l2", kernel_constraint=constraint)(inputs)
    hidden = layers.Dropout(0.0)(hidden)
    return keras.Model(inputs, layers.Dense(4)(hidden))


def cnn() -> keras.Model:
    inputs = keras.Input((16,))
    hidden = layers.Conv2D(16, 3, padding="same", use_bias=False)(layers.Reshape((4, 4, 1))(inputs))
    hidden = layers.DepthwiseConv2D(3, activation="tanh")(layers.BatchNormalization(synchronized=True)(hidden))
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(layers.GroupNormalization(4)(hidden))))


def normalized() -> keras.Model:
    """The least that all-reduces statistics in its backward pass."""
    hidden = [layers.Dense(16, use_bias=False), layers.BatchNormalization(synchronized=True), layers.Activation("tanh")]
    return keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(4)])


def transformer() -> keras.Model:
    """With an embedding that is tied to the outputs, and a layer that is shared."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedding, shared = layers.ReversibleEmbedding(VOCABULARY, 16), layers.Dense(16, "gelu")
    hidden = embedding(inputs)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 8)(hidden, hidden))
    hidden = shared(hidden + shared(hidden))
    pooled = layers.GlobalAveragePooling1D()(embedding(hidden, reverse=True))
    return keras.Model(inputs, layers.Dense(4)(pooled))


class Recurrent(keras.Model):
    """Subclassed, with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(VOCABULARY, 16, mask_zero=True)
        self.last = layers.GRU(8)
        self.head = self.add_weight(shape=(8, 4), name="head")

    def call(self, inputs):
        return keras.ops.matmul(self.last(self.embedding(inputs)), self.head)


class BothWays(Recurrent):
    """With a loop in each direction before the last one."""

    def __init__(self):
        super().__init__()
        self.recurrent = layers.Bidirectional(layers.LSTM(8, return_sequences=True))

    def call(self, inputs):
        return keras.ops.matmul(self.last(self.recurrent(self.embedding(inputs))), self.head)


MODELS = {
    **{"mlp": mlp, "cnn": cnn, "normalized": normalized},
    **{"transformer": transformer, "recurrent": Recurrent, "both ways": BothWays},
}


class TrustRatio(keras.optimizers.Optimizer):
    """An optimizer of one's own, whose step looks at the shape, the norm and the rows of a whole variable."""

    def build(self, variables):
        super().build(variables)
        self.momenta = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momenta[self._get_variable_index(variable)]
        self.assign(momentum, 0.9 * momentum + gradient / variable.shape[0])
        ratio = keras.ops.norm(keras.ops.reshape(variable, [-1])) / (1 + keras.ops.max(momentum, axis=0, keepdims=True))
        self.assign_sub(variable, learning_rate * ratio * momentum)


# A large epsilon, for a gradient near zero must not decide by its last digit between one step and its opposite.
OPTIMIZERS = {
    "sgd": lambda **options: optimizers.SGD(RATE, momentum=0.9, **options),
    "rmsprop": lambda **options: optimizers.RMSprop(0.01, centered=True, momentum=0.5, epsilon=1e-2, **options),
    "adam": lambda **options: optimizers.Adam(0.01, amsgrad=True, epsilon=1e-2, **options),
    "adamw": lambda **options: optimizers.AdamW(0.01, epsilon=1e-2, **{"weight_decay": 0.2, **options}),
    "adadelta": lambda **options: optimizers.Adadelta(RATE, epsilon=1e-2, **options),
    "adagrad": lambda **options: optimizers.Adagrad(RATE, **options),
    "adamax": lambda **options: optimizers.Adamax(0.01, epsilon=1e-2, **options),
    "nadam": lambda **options: optimizers.Nadam(0.01, epsilon=1e-2, **options),
    # It subtracts roots of accumulators, which from 0.1 on are alike but for rounding if gradients are clipped.
    "ftrl": lambda **options: optimizers.Ftrl(RATE, initial_accumulator_value=1e-6, **options),
    "lion": lambda **options: optimizers.Lion(1e-3, **options),
    "lamb": lambda **options: optimizers.Lamb(0.01, epsilon=1e-2, **options),
    "adafactor": lambda **options: optimizers.Adafactor(0.01, epsilon_1=1e-4, **options),
    "muon": lambda **options: optimizers.Muon(0.01, **options),
    "trust_ratio": lambda **options: TrustRatio(RATE, **options),
}
SETTINGS = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "ema": {"use_ema": True, "ema_momentum": 0.5},
    "ema_overwrite": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "weight_decay": {"weight_decay": 0.1},
    "scale_factor": {"loss_scale_factor": 64.0},
}


def data_for(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    rows = 22
    x = (
        generator.normal(size=(rows, 16)).astype("float32")
        if name in ("mlp", "cnn", "normalized")
        else generator.integers(0, VOCABULARY, (rows, LENGTH)).astype("int32")
    )
    return x, generator.integers(0, 4, rows), np.linspace(0.5, 2.0, rows).astype("float32")


def made_optimizer(case: Case) -> Any:
    options = {key: value for name in case.settings for key, value in SETTINGS.get(name, {}).items()}
    optimizer: Any = OPTIMIZERS[case.optimizer](**options)
    if "schedule" in case.settings:
        optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    return optimizer


def made(case: Case, *, alone: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = MODELS[case.model]()
    if not model.built:
        model(np.zeros((1, LENGTH), "int32"))
    optimizer = made_optimizer(case)
    if "accumulate" in case.settings and not alone:
        optimizer = AccumulatingOptimizer(optimizer, 2)
    if "loss_scale" in case.settings:
        optimizer = optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=alone)
    return model


def fit(fitted: Any, case: Case, batch_size: int) -> dict[str, list[float]]:
    x, y, weights = data_for(case.model)
    settings = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    return fitted(x, y, sample_weight=weights, **settings).history


def make_devices(count: int) -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )


class Updated(NamedTuple):
    """As much of a model as the *apply* stage looks at."""

    optimizer: Any
    trainable_weights: list[keras.Variable]


def variables_to_update() -> list[keras.Variable]:
    """Matrices that are cut between rows and within them, a vector, and one that is too small to be cut.

    Half of the second matrix is as long as a row, for which Keras's `add` could take it.
    """
    draw = np.random.default_rng(2)
    return [
        keras.Variable(draw.normal(size=shape).astype("float32"), name=f"weight_{place}", constraint=constraint)
        for place, (shape, constraint) in enumerate(
            [
                ((16, 24), keras.constraints.MaxNorm(1.0)),
                ((2, 24), None),
                ((3, 3, 5), None),
                ((24,), None),
                ((3,), None),
            ]
        )
    ]


def updates(argument: dict[str, Any]) -> list[dict[str, float]]:
    """Applies the same gradients to variables in shards and to whole ones; called in a process of its own.

    Each replica has gradients of its own, of which the whole variables are given the sums.
    """
    make_devices(argument["devices"])
    names = [f"CPU:{index}" for index in range(argument["devices"])]
    found = []
    for case in [Case(name, optimizer, shard, tuple(s)) for name, optimizer, shard, s in argument["cases"]]:
        keras.backend.clear_session(free_memory=False)
        dist = DistributedFit("mirrored", names, shard=case.shard, min_shard_bytes=LEAST_BYTES)
        draw = np.random.default_rng(3)
        with dist.scope():
            ours = Updated(made_optimizer(case), variables_to_update())
            ours.optimizer.build(ours.trainable_weights)
        install_storages(ours.optimizer, ours.trainable_weights)

        def step(ours: Updated, *gradients: tf.Tensor) -> None:
            apply_gradient(ours.optimizer, ours.trainable_weights, list(gradients), reduce_first=True)  # pyright: ignore

        run = tf.function(functools.partial(dist.strategy.run, functools.partial(step, ours)), autograph=False)
        reference = Updated(made_optimizer(case), variables_to_update())
        for _ in range(argument["updates"]):
            parts = [
                [draw.normal(size=each.shape).astype("float32") for each in reference.trainable_weights] for _ in names
            ]
            run(args=[_by_replica(dist.strategy, part) for part in zip(*parts, strict=True)])
            reference.optimizer.apply([sum(part) for part in zip(*parts, strict=True)], reference.trainable_weights)
        finished = [ours, reference]
        for each in finished:
            each.optimizer.finalize_variable_values(each.trainable_weights)
        values = [[variable.numpy() for variable in each.trainable_weights] for each in finished]
        slots = [[variable.numpy() for variable in each.optimizer.variables] for each in finished]
        found.append(
            {
                "case": str(case),
                "weights": _apart(*values),
                "slots": _apart(*slots),
                "in_shards": sum(sharded_value(variable) is not None for variable in ours.trainable_weights),
            }
        )
    return found


def held_after_updates(optimizer: str) -> float:
    """The memory of a matrix and its slots in shards, in matrices; called in a process of its own."""
    make_devices(2)
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], shard="parameters")
    before, side = _resident(), 4096
    with dist.scope():
        ours = Updated(OPTIMIZERS[optimizer](), [keras.Variable(keras.initializers.Zeros()((side, side)))])
        ours.optimizer.build(ours.trainable_weights)

    @tf.function(autograph=False)
    def step() -> None:
        dist.strategy.run(
            lambda: apply_gradient(ours.optimizer, ours.trainable_weights, [tf.ones((side, side))], reduce_first=True)
        )  # pyright: ignore

    step()
    ours.trainable_weights[0].assign(np.ones((side, side), "float32"))
    step()
    gc.collect()
    return (_resident() - before) / (4 * side**2)


def most_while_building(_: Any) -> float:
    """The most memory taken while a model and its optimizer are made in shards, in what they have in the end.

    Called in a process of its own.
    """
    make_devices(4)
    dist = DistributedFit("mirrored", [f"CPU:{index}" for index in range(4)], shard="parameters")
    side, matrices = 2048, 6
    with dist.scope():
        # TensorFlow and Keras make what they need for this later.
        small = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        small.compile("adam", "mse")
        small.optimizer.build(small.trainable_variables)
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5")
        model = keras.Sequential([keras.Input((side,)), *[keras.layers.Dense(side) for _ in range(matrices)]])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    (peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return (int(peak) * 1024 - before) / (3 * matrices * 4 * side**2)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _by_replica(strategy: Any, values: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def _apart(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference in a variable over the largest value in it."""
    pairs = [
        (np.asarray(one, "float64"), np.asarray(other, "float64")) for one, other in zip(ours, theirs, strict=True)
    ]
    return max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6)) for one, other in pairs)


def differences(argument: dict[str, Any]) -> list[dict[str, float]]:
    """Trains each case in shards and alone, and returns how far apart they end; called in a process of its own."""
    count = argument["devices"]
    make_devices(count)
    names = [f"CPU:{index}" for index in range(count)]
    workers = "TF_CONFIG" in os.environ
    strategy: Any = "multi_worker" if workers else "mirrored"
    found = []
    for case in [Case(name, optimizer, shard, tuple(s)) for name, optimizer, shard, s in argument["cases"]]:
        keras.backend.clear_session(free_memory=False)
        jit = "jit" in case.settings
        # Several workers join one cluster, once.
        dist = DistributedFit(
            strategy,
            None if isinstance(strategy, tf.distribute.Strategy) else names,
            shard=case.shard,
            min_shard_bytes=LEAST_BYTES,
            jit=jit,
        )
        strategy = dist.strategy if workers else strategy
        with dist.scope():
            model = made(case, alone=False)
        with contextlib.ExitStack() as attached:
            if "recompute" in case.settings:
                layers_of_it = [layer.name for layer in model.layers if layer.weights]
                attached.enter_context(recompute(model, layers=layers_of_it))
            if "slices" in case.settings:
                attached.enter_context(microbatch(model, 3))
            size = 4 if "accumulate" in case.settings else 8
            history = fit(functools.partial(dist.fit, model), case, size)
        x, y, _ = data_for(case.model)
        evaluated = argument["evaluated"] and not found
        shown = model.evaluate(x, y, batch_size=8, verbose=0) if evaluated else 0.0
        predictions = model.predict(x, batch_size=8, verbose=0) if evaluated else 0.0
        weights = model.get_weights()
        keras.backend.clear_session(free_memory=False)
        reference = made(case, alone=True)
        theirs = fit(reference.fit, case, 8)
        largest = max(np.abs(each).max() for each in reference.get_weights())
        pairs = zip(weights, reference.get_weights(), strict=True)
        expected = reference.evaluate(x, y, verbose=0) if evaluated else 0.0
        predicted = reference.predict(x, verbose=0) if evaluated else 0.0
        found.append(
            {
                "case": str(case),
                "weights": float(max(np.abs(ours - other).max() for ours, other in pairs) / largest),
                "loss": float(np.abs(np.subtract(history["loss"], theirs["loss"])).max()),
                "evaluation": float(np.abs(np.subtract(shown, expected)).max()),
                "predictions": float(np.abs(np.subtract(predictions, predicted)).max()),
                "in_shards": sum(sharded_value(variable) is not None for variable in model.trainable_variables),
                "slots": sum(sharded_value(variable) is not None for variable in model.optimizer.variables),
            }
        )
    return json.loads(json.dumps(found))
