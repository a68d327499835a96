"""Ways to train a miniature: plain Keras on whole batches, and each component."""

import tempfile
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np
from foreign.keras_io.miniature import BATCH, Miniature

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    GradientTelemetry,
    microbatch,
    recompute,
)

STEPS, SLICE, EPOCHS = 4, 3, 2
OPTIONS = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}


class Trained(NamedTuple):
    """Where a training has ended: the model's weights, and what `fit` has shown."""

    weights: list[np.ndarray]
    history: dict[str, list[float]]


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _fitted(case: Miniature, model: Any, batch_size: int = BATCH, fit: Any = None, **options: Any) -> Trained:
    options = {**OPTIONS, **options}
    if callable(case.data):
        history = (fit or model.fit)(case.data(batch_size), **options)
    else:
        data = dict(zip(("x", "y", "sample_weight"), case.data, strict=False))
        history = (fit or model.fit)(**data, batch_size=batch_size, **options)
    return Trained(weights_of(model), history.history)


def weights_of(model: Any) -> list[np.ndarray]:
    """All weights, without the states of random numbers."""
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights if "seed" not in weight.path]


def _built(case: Miniature, optimizer: Any = _sgd, changed: Mapping[str, Any] = MappingProxyType({})) -> Any:
    keras.utils.set_random_seed(0)
    return case.build(optimizer, **changed)


# In the loss of one output of several, a batch counts by the rows that it was traced with, or as one. Keras 3.16 traces
# the size of the first batch by itself, and shows other numbers than in one trace.
COUNTED_BY_TRACE = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)


def plain(case: Miniature, changed: Mapping[str, Any] = MappingProxyType({})) -> Trained:
    """Keras on whole batches."""
    return _fitted(case, _built(case, changed=changed))


def accumulation(case: Miniature, **options: Any) -> Trained:
    """Windows of four micro-batches."""
    model = _built(case, lambda: AccumulatingOptimizer(_sgd(), STEPS, **options))
    return _fitted(case, model, BATCH // STEPS, callbacks=[ExactAccumulation()])


def slices(case: Miniature, **options: Any) -> Trained:
    """Slices of three rows, and one of two."""
    model = _built(case)
    with microbatch(model, SLICE, **options):
        return _fitted(case, model)


def replicas(case: Miniature, changed: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Trained:
    """Two devices."""
    return _distributed(case, DistributedFit("mirrored", devices=["CPU:0", "CPU:1"], **options), changed)


def _distributed(case: Miniature, dist: DistributedFit, changed: Mapping[str, Any] = MappingProxyType({})) -> Trained:
    with dist.scope():
        model = _built(case, changed=changed)
    return _fitted(case, model, fit=lambda *data, **keywords: dist.fit(model, *data, **keywords))


def shards(case: Miniature, **options: Any) -> Trained:
    """Two devices with half of each weight."""
    return replicas(case, shard="parameters", min_shard_bytes=16, **options)


def on_a_worker(given: tuple[str, dict[str, Any]]) -> tuple[float, float]:
    """The errors on one of several workers, which have parts of each weight; called in a process of its own.

    Args:
        given: The miniature, and what is changed in it.
    """
    dist = DistributedFit("multi_worker", devices=["CPU:0"], shard="parameters", min_shard_bytes=16)
    # They compute as they are imported, and workers meet before.
    from foreign.keras_io.miniatures import MINIATURES

    name, changed = given
    return errors(_distributed(MINIATURES[name], dist, changed), plain(MINIATURES[name], changed))


def recomputation(case: Miniature) -> Trained:
    """Parts of the model again in the backward pass."""
    model = _built(case)
    handle = recompute(model, case.blocks(model)) if case.blocks else recompute(model, every=1)
    with handle:
        return _fitted(case, model)


def telemetry(case: Miniature) -> Trained:
    """With each update's gradient in the history, which it is left out of again."""
    with tempfile.TemporaryDirectory() as logs:
        trained = _fitted(case, _built(case), callbacks=[GradientTelemetry(logs, every=1)])
    if "gradient_norm" not in trained.history:
        raise ValueError("no update was measured")
    return trained


WAYS: dict[str, Callable[..., Trained]] = {
    each.__name__: each for each in (accumulation, slices, replicas, shards, recomputation, telemetry)
}


def errors(found: Trained, wanted: Trained) -> tuple[float, float]:
    """The largest errors of weights, and of what `fit` has shown, as shares of the largest of each or of one."""
    weights = [
        np.abs(one - other).max(initial=0) / max(1.0, np.abs(other).max(initial=0))
        for one, other in zip(found.weights, wanted.weights, strict=True)
    ]
    shown = [
        abs(one - other) / max(1.0, abs(other))
        for name, values in wanted.history.items()
        if not (COUNTED_BY_TRACE and name.removeprefix("val_").endswith("_loss"))
        for one, other in zip(found.history[name], values, strict=True)
    ]
    return float(max(weights)), float(max(shown, default=0.0))
