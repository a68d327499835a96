"""Each model of others, trained by each component that claims it, ends where plain Keras ends on whole batches.

In `make test`, miniatures of Keras's examples do.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import gradient_error, norms_of
from sample_models.foreign_models import APPLICATIONS, FOREIGN, ROWS, TASKS, Foreign, settled

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

pytestmark = pytest.mark.long
# Rounding in float32, which plain Keras has too between a batch and its parts.
TOLERANCE = 1e-6
# Of norms after a step. Plain Keras's own move by 1.6e-6 where weights differ by 7.5e-9, as between two ways to sum.
NORMS_TOLERANCE = {"ConvNeXtTiny": 3e-6}
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


@pytest.mark.parametrize("name", FOREIGN)
def test_accumulation(name):
    assert error(accumulating(name), reference(name).trained) < TOLERANCE


@pytest.mark.parametrize("name", FOREIGN)
def test_slices(name):
    assert error(in_slices(name), reference(name).trained) < TOLERANCE


@pytest.mark.parametrize("name", FOREIGN)
def test_recomputation(name):
    assert error(recomputed(name), reference(name).trained) < TOLERANCE


@pytest.mark.parametrize("name", APPLICATIONS)
def test_slices_without_a_graph(name):
    """Of those that take long to compile."""
    # In two, as each takes as long as the whole batch.
    assert error(in_slices(name, 4, run_eagerly=True), reference(name).trained) < TOLERANCE


@pytest.mark.parametrize("name", FOREIGN)
def test_norms(name):
    start = reference(name).start
    wanted = norms_one_by_one(name, start)
    assert np.abs(norms(name, start) - wanted).max() < TOLERANCE * wanted.max()


@pytest.mark.parametrize("name", FOREIGN)
def test_wrapped(name):
    trained, shown = wrapped(name)
    assert error(trained, reference(name).trained) < TOLERANCE
    wanted = norms_one_by_one(name, reference(name).middle)
    assert np.abs(shown - wanted).max() < NORMS_TOLERANCE.get(name, TOLERANCE) * wanted.max()


@pytest.mark.parametrize("name", FOREIGN)
def test_watched(name, tmp_path):
    # Reading the trace of a large model takes xprof many seconds.
    profiles = name not in APPLICATIONS
    trained, telemetry = watched(name, tmp_path, profiles)
    wanted = reference(name).trained
    assert error(trained, wanted) < TOLERANCE
    np.testing.assert_allclose(telemetry.last.model.gradient_norm, wanted.gradients, rtol=TOLERANCE)
    written = {path.name for path in tmp_path.rglob("*")}
    assert {"telemetry.csv", "throughput.csv"} <= written
    assert ("keras_paragrad.json" in written) == profiles


@pytest.mark.own_process(seconds=900)
@pytest.mark.parametrize("name", FOREIGN)
def test_replicas(mirrored, name):
    assert error(on_replicas(name, mirrored), reference(name).trained) < TOLERANCE


@pytest.mark.own_process(seconds=900)
@pytest.mark.parametrize("name", FOREIGN)
def test_shards(mirrored, name):
    assert error(on_replicas(name, mirrored, shard="parameters"), reference(name).trained) < TOLERANCE


@pytest.mark.parametrize("name", TASKS)
def test_compiled_by_xla(name):
    wanted = reference(name).trained
    for way in (accumulating, in_slices, lambda name, **options: wrapped(name, **options)[0]):
        # XLA orders its sums in another way than the operations of the reference.
        assert error(way(name, jit_compile=True), wanted) < 3 * TOLERANCE
