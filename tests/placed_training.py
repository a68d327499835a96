"""Models that are changed, looked at and written to after they were placed, in each way to place them."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from counting import counting_model
from keras import layers
from pipelined_training import DEVICES, apart, configure

from keras_paragrad import DistributedFit
from keras_paragrad.distribution import Pipeline

TWO = DEVICES[:2]
WAYS: dict[str, Callable[[], DistributedFit]] = {
    "mesh": lambda: DistributedFit(mesh={"batch": 1, "model": 2}, layout="auto", devices=TWO),
    "pipeline": lambda: DistributedFit(Pipeline(cuts=["a"], microbatches=2), devices=TWO),
    "columns": lambda: DistributedFit(Pipeline(cuts=["a"], microbatches=2), devices=[DEVICES[:2], DEVICES[2:]]),
    "auto": lambda: DistributedFit("mirrored", TWO, shard="auto", min_shard_bytes=64),
    "parameters": lambda: DistributedFit("mirrored", TWO, shard="parameters", min_shard_bytes=64),
    "optimizer": lambda: DistributedFit("mirrored", TWO, shard="optimizer", min_shard_bytes=64),
    "replicas": lambda: DistributedFit("mirrored", TWO),
}


class Way:
    """How a model is made and trained: in one of the ways, or by Keras alone."""

    def __init__(self, name: str | None):
        self.dist = WAYS[name]() if name else None

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


SCENARIOS = {"changed": changed}


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


def counted(_: None) -> dict[str, list[float]]:
    """What a model that counts its batches, and the computations of its loss, has counted in each way."""
    configure()
    ways: dict[str, Any] = {
        "alone": None,
        "mesh": WAYS["mesh"](),
        "pipeline": DistributedFit(Pipeline(cuts=["first"], microbatches=1), devices=TWO),
    }
    found = {}
    for name, dist in ways.items():
        with dist.scope() if dist else contextlib.nullcontext():
            model = counting_model(8, loss="mse")
        x = data()[0]
        fit: Any = functools.partial(dist.fit, model) if dist else model.fit
        shown = fit(x, x, batch_size=8, verbose=0).history
        counts = model.get_layer("counting")
        found[name] = [*(float(np.asarray(each)) for each in (counts.number, *counts.seeds.state.numpy()))]
        found[name] += [shown["losses_computed"][0], shown["inputs_seen"][0]]
    return found
