"""Ways to train a foreign model: plain Keras on whole batches, and each component that takes the same steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from oracles.whole_batches import gradient_error, norms_of
from sample_models.foreign_models import FOREIGN, ROWS, Foreign, settled

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    GradientTelemetry,
    Profiler,
    ProfileSchedule,
    Throughput,
    microbatch,
    per_example_norms,
    recompute,
    wrap,
)
from keras_paragrad.storage.sharded import sharded_value

EPOCHS, MOMENTUM = 2, 0.9
# Of variables in shards: these models are small.
LEAST_BYTES = 256
# What the rows are cut into: three and three and one.
PART = 3


class Trained(NamedTuple):
    """Where a training has ended.

    Attributes:
        weights: All of the model's.
        moments: The optimizer's: of one update its gradient, of two both, so that errors don't drown in the weights.
        history: What `fit` has shown.
        gradients: The global norm of each update's gradient, of the reference only.
    """

    weights: list[np.ndarray]
    moments: list[np.ndarray]
    history: dict[str, list[float]]
    gradients: list[float] = []


class Reference(NamedTuple):
    """What plain Keras does with a model, on whole batches.

    Attributes:
        start: The weights it began with.
        middle: Those before the last update.
        trained: Where it ended.
    """

    start: list[np.ndarray]
    middle: list[np.ndarray]
    trained: Trained


_references: dict[str, Reference] = {}


def reference(name: str) -> Reference:
    """Plain Keras, eagerly: it takes less time than compiling two steps."""
    if name not in _references:
        case, norms = FOREIGN[name], []
        model = built(case)
        weights = [model.get_weights()]
        before = [np.zeros(weight.shape) for weight in model.trainable_weights]

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                nonlocal before
                moments = [moment.numpy() for moment in model.optimizer.momentums]
                steps = [(new - MOMENTUM * old) / case.rate for new, old in zip(moments, before, strict=True)]
                norms.append(float(np.sqrt(sum(np.square(step, dtype="float64").sum() for step in steps))))
                before = moments
                weights.append(model.get_weights())

        compiled(model, case, run_eagerly=True)
        trained = fitted(model, case, callbacks=[Look()])
        _references[name] = Reference(*weights[:EPOCHS], trained._replace(gradients=norms))
    return _references[name]


def built(case: Foreign, start: list[np.ndarray] | None = None) -> Any:
    keras.utils.set_random_seed(0)
    model = case.build()
    if not model.built:
        model(case.x)
    if start is None:
        return settled(model, case)
    model.set_weights(start)
    return model


def compiled(model: Any, case: Foreign, optimizer: Any = None, **options: Any) -> Any:
    # KerasHub's tasks have metrics of their own unless told otherwise.
    options = {"jit_compile": False, "metrics": [], "weighted_metrics": list(case.metrics), **options}
    model.compile(optimizer or sgd(case), loss=case.loss, **options)
    return model


def sgd(case: Foreign) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(case.rate, momentum=MOMENTUM)


def fitted(
    model: Any, case: Foreign, batch_size: int = ROWS, fit: Callable[..., Any] | None = None, **options: Any
) -> Trained:
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "sample_weight": case.sample_weight, **options}
    history = (fit or model.fit)(case.x, case.y, batch_size=batch_size, **options)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return Trained(model.get_weights(), [moment.numpy() for moment in optimizer.momentums], history.history)


def accumulating(name: str, **options: Any) -> Trained:
    """`AccumulatingOptimizer` and `ExactAccumulation`: three batches, uneven ones, to an update."""
    case = FOREIGN[name]
    model = built(case, reference(name).start)
    steps = -(-ROWS // PART)
    compiled(model, case, AccumulatingOptimizer(sgd(case), steps), **options)
    return fitted(model, case, PART, callbacks=[ExactAccumulation()])


def in_slices(name: str, size: int = PART, **options: Any) -> Trained:
    """`microbatch`: the same within a step."""
    case = FOREIGN[name]
    model = compiled(built(case, reference(name).start), case, **options)
    with microbatch(model, size):
        return fitted(model, case)


def recomputed(name: str, **options: Any) -> Trained:
    """`recompute`: each part again in the backward pass, or each layer where the model can't be cut."""
    case = FOREIGN[name]
    model = compiled(built(case, reference(name).start), case, **options)
    try:
        handle = recompute(model, every=1)
    except ValueError:
        handle = recompute(model, [layer for layer in model.layers if layer.trainable_weights])
    with handle:
        return fitted(model, case)


def on_replicas(name: str, strategy: tf.distribute.Strategy, *, shard: str | None = None, **options: Any) -> Trained:
    """`DistributedFit.prepare`: each batch on two devices, and the weights too if they are in shards."""
    case, start = FOREIGN[name], reference(name).start
    dist = DistributedFit(strategy=strategy, shard=shard, min_shard_bytes=LEAST_BYTES)
    with dist.scope():
        model = compiled(built(case, start), case, **options)
    assert any(sharded_value(weight) for weight in model.trainable_weights) == (shard is not None)
    dist.prepare(model)
    return fitted(model, case)


def wrapped(name: str, **options: Any) -> tuple[Trained, np.ndarray]:
    """`wrap`: the same steps, and the norms of the last."""
    case = FOREIGN[name]
    model = compiled(wrap(built(case, reference(name).start)), case, **options)
    return fitted(model, case), model.per_example.norms


def watched(name: str, log_dir: Path, profiles: bool, **options: Any) -> tuple[Trained, GradientTelemetry]:
    """`GradientTelemetry`, `Throughput` and `Profiler` look at plain steps."""
    case = FOREIGN[name]
    model = compiled(built(case, reference(name).start), case, **options)
    telemetry, throughput = GradientTelemetry(log_dir, every=1), Throughput(log_dir)
    callbacks: list[Any] = [telemetry, throughput]
    if profiles:
        schedule = ProfileSchedule(skip_first=1, warmup=0, active=1)
        callbacks.append(Profiler(log_dir, schedule, summary=False, report=None))
    return fitted(model, case, callbacks=callbacks), telemetry


def norms(name: str, weights: list[np.ndarray]) -> np.ndarray:
    """`per_example_norms`, with sample weights."""
    case = FOREIGN[name]
    return per_example_norms(built(case, weights), case.x, case.y, case.loss, case.sample_weight)


def norms_one_by_one(name: str, weights: list[np.ndarray]) -> np.ndarray:
    """Each row alone through plain Keras."""
    case = FOREIGN[name]
    model = built(case, weights)
    found = []
    for row in range(ROWS):
        x, y, weight = keras.tree.map_structure(
            lambda each, row=row: None if each is None else each[row : row + 1], (case.x, case.y, case.sample_weight)
        )
        with tf.GradientTape() as tape:
            value = case.loss(y, model(keras.tree.map_structure(tf.constant, x)), sample_weight=weight)
        gradients = tape.gradient(value, [each.value for each in model.trainable_weights], unconnected_gradients="zero")
        found.append([tf.convert_to_tensor(each).numpy() for each in gradients])
    return norms_of([np.stack(parts) for parts in zip(*found, strict=True)])


def error(found: Trained, wanted: Trained) -> float:
    """The largest error of what two updates were made of, as a share of its norm, and of what `fit` has shown."""
    scale = float(np.sqrt(sum(np.square(moment, dtype="float64").sum() for moment in wanted.moments)))
    errors = [gradient_error(found.moments, wanted.moments, scale)]
    weights = max(1.0, *(float(np.abs(weight).max()) for weight in wanted.weights))
    errors.append(gradient_error(found.weights, wanted.weights, weights))
    for shown, values in wanted.history.items():
        errors += [abs(a - b) / max(1.0, abs(b)) for a, b in zip(found.history[shown], values, strict=True)]
    return max(errors)
