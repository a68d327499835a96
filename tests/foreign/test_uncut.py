"""Examples with steps of their own, or that mix rows: divided, refused or looked at by each component."""

import keras
import numpy as np
import pytest
from sample_models.foreign_models import EXAMPLES, Recommender, Variational, segmentation

from keras_paragrad import (
    AccumulatingOptimizer,
    ExactAccumulation,
    GradientTelemetry,
    Profiler,
    ProfileSchedule,
    Throughput,
    microbatch,
    per_example_norms,
    wrap,
)
from keras_paragrad.distribution.replicas.parallelism import ReplicaPreparation

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def variational(optimizer="sgd"):
    keras.utils.set_random_seed(0)
    model = Variational()
    model(X)
    model.compile(optimizer)
    return model


def test_a_train_step_of_its_own_is_cut():
    """It draws its noise, so that slices draw other numbers than the batch."""
    model, accumulating = variational(), variational(AccumulatingOptimizer("sgd", 2, weighting="examples"))
    with microbatch(model, 3):
        history = model.fit(X, verbose=0).history
    assert np.isfinite(history["total"]).all()
    assert int(model.optimizer.iterations) == 1
    accumulating.fit(X, batch_size=4, verbose=0, callbacks=[ExactAccumulation()])
    assert int(accumulating.optimizer.iterations) == 1
    with pytest.raises(ValueError, match="train_step"):
        wrap(variational())


@pytest.mark.long
@pytest.mark.own_process
def test_a_train_step_of_its_own_is_spread(mirrored):
    with mirrored.scope():
        model = variational()
    ReplicaPreparation(model)
    history = model.fit(X, batch_size=7, verbose=0).history
    assert np.isfinite(history["total"]).all()
    assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.long
def test_a_train_step_of_its_own_is_looked_at(tmp_path):
    plain, seen = variational(), variational()
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(X, **options).history
    profiler = Profiler(tmp_path, ProfileSchedule(skip_first=1, warmup=0, active=1), summary=False, report=None)
    found = seen.fit(X, callbacks=[GradientTelemetry(every=1), Throughput(batch_size=4), profiler], **options).history
    np.testing.assert_allclose(found["total"], expected["total"], rtol=1e-6)
    for one, other in zip(seen.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert len(profiler.summaries) == 1


def test_a_layer_that_mixes_rows_has_no_gradients_of_examples():
    model, pairs = Recommender(), np.random.default_rng(0).integers(0, 10, (8, 2))
    model(pairs)
    with pytest.raises(ValueError, match="depends on the others in the batch"):
        per_example_norms(model, pairs, np.ones((8, 1)), keras.losses.BinaryCrossentropy())


@pytest.mark.long
def test_batch_normalization_that_trains_is_warned_of_where_it_is_cut(tmp_path):
    case = EXAMPLES["segmentation"]

    def training():
        keras.utils.set_random_seed(0)
        model = segmentation()
        for layer in model.layers:
            layer.trainable = True
        model.compile("sgd", case.loss, jit_compile=False)
        return model

    with pytest.warns(UserWarning, match="normaliz"):
        microbatch(training(), 4)
    plain, seen = training(), training()
    # Tracing takes longer than the step.
    plain.run_eagerly = seen.run_eagerly = True
    plain.fit(case.x, case.y, shuffle=False, verbose=0)
    seen.fit(case.x, case.y, shuffle=False, verbose=0, callbacks=[GradientTelemetry(every=1), Throughput(tmp_path)])
    for one, other in zip(seen.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * max(1.0, np.abs(other).max()), rtol=0)
