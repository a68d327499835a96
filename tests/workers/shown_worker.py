"""What two workers of one cluster show of losses and metrics, case by case."""

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from oracles.histories import BATCHES, CASES, MicroBatches, shown_by
from sample_models import every_metric, hub_task, own_steps
from sample_models.comparing_losses import LOSSES

# Of the examples on one worker alone.
NORMS = "norms"


def main(names: list[str]) -> dict[str, Any]:
    """Runs the named cases; returns for each what it has shown, or what it raised."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from keras_paragrad import DistributedFit

    dist = DistributedFit(startup_timeout=60, jit=False)

    def alike(**options: Any) -> DistributedFit:
        return DistributedFit(strategy=dist.strategy, jit=False, **options)

    found = {}
    for name in names:
        kind, _, case = name.partition(": ")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = KINDS[kind](alike, case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def losses(alike: Callable[..., Any] | None, name: str) -> dict[str, list[float]]:
    case = CASES[name]
    # Tracing takes longer than the steps.
    mode = {} if name == "mask" else {"run_eagerly": True}
    if alike is None:
        return case.expected(**mode)
    dist = alike(weighting=case.weighting)
    with dist.scope():
        model = case.model(**mode)
    dist.prepare(model)
    return shown_by(case, model, *(dist.dataset(MicroBatches(case.columns, BATCHES)) for _ in range(2)))


def comparing(alike: Callable[..., Any] | None, name: str) -> dict[str, Any]:
    """The losses and weights after training by a loss that compares examples, in batches of which one has a row."""
    dist = alike() if alike else None
    with dist.scope() if dist else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, "tanh", kernel_regularizer="l2"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.05), LOSSES[name](), run_eagerly=dist is None)
    generator = np.random.default_rng(0)
    columns = generator.normal(size=(15, 6)).astype("float32"), generator.integers(0, 3, 15).astype("float32")
    data = [MicroBatches(columns, BATCHES) for _ in range(2)]
    if dist:
        dist.prepare(model)
        data = [dist.dataset(each) for each in data]
    shown = model.fit(data[0], epochs=2, verbose=0, shuffle=False, validation_data=data[1]).history
    weights = enumerate(model.get_weights())
    return {**shown, **{f"weight {number}": np.ravel(weight).tolist() for number, weight in weights}}


def steps(alike: Callable[..., Any] | None, name: str) -> dict[str, float]:
    return own_steps.evaluated(name, alike, run_eagerly=True)


def metrics(alike: Callable[..., Any] | None, name: str) -> dict[str, Any]:
    """All of `keras.metrics` in training and evaluation, or what batches that come whole are counted as."""
    x, y = every_metric.data()
    named = every_metric.all_metrics if name == "of batches read" else _two_metrics
    dist = alike() if alike else None
    if dist is None:
        model = every_metric.model_with(named(), run_eagerly=True)
    else:
        with dist.scope():
            model = every_metric.model_with(named(), run_eagerly=True)
        dist.prepare(model)
    if name == "of whole batches":
        return _of_whole_batches(model, x, y)
    sizes = (7, 7, 1)
    data, checked = (MicroBatches((x, y), sizes) for _ in range(2))
    if dist:
        data, checked = dist.dataset(data), dist.dataset(checked)
    history = model.fit(data, validation_data=checked, shuffle=False, verbose=0).history
    # Some have a value for each class.
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), history)


def _two_metrics() -> dict[str, list[Any]]:
    return {"rows": [keras.metrics.TruePositives(name="hits"), "mae"]}


def _of_whole_batches(model: Any, x: Any, y: Any) -> dict[str, Any]:
    found = {}
    # The last leaves a worker without a row.
    for rows in (7, 4, 1):
        part = x[:rows], {name: column[:rows] for name, column in y.items()}
        weights = {name: np.linspace(0.5, 2, rows, dtype="float32") for name in y}
        for method in ("train_on_batch", "test_on_batch"):
            shown = getattr(model, method)(*part, sample_weight=weights, return_dict=True)
            found |= {f"{method} {rows} {key}": float(value) for key, value in shown.items()}
        predicted = model.predict_on_batch(part[0])
        found |= {f"predict_on_batch {rows} {key}": value.tolist() for key, value in predicted.items()}
    return found


def tasks(alike: Callable[..., Any] | None, name: str) -> tuple:
    return hub_task.trained(alike() if alike else None, name == "preprocessor=None")


KINDS: dict[str, Callable[[Callable[..., Any] | None, str], Any]] = {
    "comparing": comparing,
    "loss": losses,
    "own step": steps,
    "metrics": metrics,
    "task": tasks,
}
