"""Models that are changed, looked at and written to after they were placed, in each way to place them."""

import contextlib
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sample_models.counting import counting_model
from trainings.placed_models import DEVICES, apart, configure

from keras_paragrad import DistributedFit
from keras_paragrad.distribution import Pipeline

TWO = DEVICES[:2]
WAYS: dict[str, Callable[[], DistributedFit]] = {
    "mesh": lambda: DistributedFit(mesh={"batch": 1, "model": 2}, layout="auto", devices=TWO),
    "pipeline": lambda: DistributedFit(Pipeline(stages=2, microbatches=1), devices=TWO),
    "columns": lambda: DistributedFit(Pipeline(cuts=["a"], microbatches=2), devices=[DEVICES[:2], DEVICES[2:]]),
    "fitted": lambda: DistributedFit("mirrored", TWO, fit_memory=True, device_bytes=2**40, min_shard_bytes=64),
    "parameters": lambda: DistributedFit("mirrored", TWO, shard="parameters", min_shard_bytes=64),
    "optimizer": lambda: DistributedFit("mirrored", TWO, shard="optimizer", min_shard_bytes=64),
    "replicas": lambda: DistributedFit("mirrored", TWO),
}


class Way:
    """How a model is made and trained: in one of the ways, or by Keras alone."""

    def __init__(self, name: str | None):
        self.dist = WAYS[name]() if name else None
        # Whether its variables are cut, in which case TensorFlow's writes to rows are ours.
        self.cut = name in ("mesh", "parameters", "optimizer")

    def scope(self) -> Any:
        return self.dist.scope() if self.dist else contextlib.nullcontext()

    def compile(self, model: keras.Model, optimizer: Callable[[], Any], **settings: Any) -> None:
        # Outside of the scope, wherever Keras allows it.
        with self.scope() if model.distribute_strategy.num_replicas_in_sync > 1 else contextlib.nullcontext():
            model.compile(optimizer(), "mse", **settings)

    def fit(self, model: keras.Model, **settings: Any) -> dict[str, list[float]]:
        fit: Any = functools.partial(self.dist.fit, model) if self.dist else model.fit
        return fit(*data(), batch_size=12, shuffle=False, verbose=0, **settings).history

    def undone(self, model: keras.Model) -> "Way":
        """How to train what this has trained on one device; on replicas, variables stay where they are."""
        if self.dist is None or model.distribute_strategy.num_replicas_in_sync > 1:
            return self
        self.dist.prepare(model).undo()
        return Way(None)


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(24, 8)).astype("float32"), generator.normal(size=(24, 4)).astype("float32")


def perceptron() -> keras.Model:
    keras.utils.set_random_seed(1)
    names = {"a": 8, "b": 8, "c": 4}
    return keras.Sequential([keras.Input((8,)), *(layers.Dense(size, "tanh", name=n) for n, size in names.items())])


def changed(way: Way) -> list[list[np.ndarray]]:
    """The weights after each of several trainings, between which the model is changed and compiled again."""
    with way.scope():
        model = perceptron()
    a, b, c = model.layers
    found = []

    def trained(way: Way) -> None:
        way.compile(model, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
        way.fit(model)
        found.append([each.numpy() for each in sorted(model.variables, key=lambda each: each.path)])

    b.trainable = False
    trained(way)
    a.trainable, b.trainable = False, True
    b.kernel.regularizer, b.kernel.constraint = keras.regularizers.L2(0.1), keras.constraints.MaxNorm(0.5)
    trained(way)
    with way.scope():
        c.enable_lora(2)
    # One that starts at zero has no gradient at first.
    c.lora_kernel_b.assign(keras.ops.ones(c.lora_kernel_b.shape))
    trained(way)
    assert len({variable.value.device for variable in c.variables}) == 1
    a.trainable, c.trainable = True, False
    trained(way.undone(model))
    return found


class Writes(keras.callbacks.Callback):
    """Computes with variables after each epoch, writes to them, and takes a gradient."""

    def __init__(self, way: Way):
        super().__init__()
        self.way, self.gradients = way, []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        a, b, c = (layer.kernel for layer in self.model.layers)
        a.assign(0.9 * a - 0.1 * keras.ops.matmul(a, a) + keras.ops.convert_to_tensor(a) ** 2)
        a.assign_add(0.01 * tf.gather(a.value, [1]))
        rows = tf.IndexedSlices(tf.ones((1, 8)), tf.constant([1]), tf.constant((8, 8)))
        if self.way.cut:
            b.value.scatter_sub(rows)
        else:
            # On whole replicas, TensorFlow has none.
            b.assign_sub(tf.convert_to_tensor(rows))
        self.model.distribute_strategy.extended.update(c.value, lambda each: each.assign(each / (1 + tf.norm(each))))
        x, y = data()
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self.model(tf.constant(x[:8]), training=True) - y[:8]))
        self.gradients += [np.asarray(each) for each in tape.gradient(loss, self.model.trainable_variables)]


def written(way: Way) -> list[list[np.ndarray]]:
    """The weights, losses and gradients where callbacks write to variables, and validate with other weights."""
    with way.scope():
        model = perceptron()
    way.compile(model, lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5))
    writes = Writes(way)
    swaps = keras.callbacks.SwapEMAWeights()
    shown = way.fit(model, epochs=2, validation_data=data(), validation_batch_size=12, callbacks=[swaps, writes])
    return [model.get_weights(), [np.asarray(shown["val_loss"])], writes.gradients]


def stepped(way: Way) -> list[list[np.ndarray]]:
    """The weights after a loop of one's own of a model that was placed before, and from a checkpoint before that."""
    with way.scope():
        model = perceptron()
    way.compile(model, lambda: keras.optimizers.Adam(0.01, epsilon=1e-2))
    way.fit(model)
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(f"{tempfile.mkdtemp()}/checkpoint")
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(data()[0], training=True) - data()[1]))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    weights = model.get_weights()
    checkpoint.restore(path).assert_existing_objects_matched()
    return [weights, model.get_weights()]


def counted(way: Way) -> list[list[np.ndarray]]:
    """What a model has counted that counts its batches, and the computations of its loss."""
    with way.scope():
        model = counting_model(8, loss="mse")
    x = data()[0]
    fit: Any = functools.partial(way.dist.fit, model) if way.dist else model.fit
    shown = fit(x, x, batch_size=8, verbose=0).history
    counts = model.get_layer("counting")
    state = [counts.number.numpy(), counts.seeds.state.numpy().astype("float64")]
    return [state, [np.asarray(shown[name]) for name in ("losses_computed", "inputs_seen")]]


SCENARIOS: dict[str, Callable[[Way], list[list[np.ndarray]]]] = {
    "changed": changed,
    "written": written,
    "counted": counted,
    "stepped": stepped,
}


def compared(asked: dict[str, list[str]]) -> dict[str, dict[str, list[float]]]:
    """By scenario and way, how far each thing that a scenario finds is from what it finds on one device."""
    configure()
    found: dict[str, dict[str, list[float]]] = {}
    for scenario, ways in asked.items():
        expected = SCENARIOS[scenario](Way(None))
        for name in ways:
            keras.backend.clear_session(free_memory=False)
            ours = SCENARIOS[scenario](Way(name))
            found.setdefault(scenario, {})[name] = [apart(*pair) for pair in zip(ours, expected, strict=True)]
    return found
