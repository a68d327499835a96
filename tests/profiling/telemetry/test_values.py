"""What `GradientTelemetry` reports, against a loop of its own, in every way of taking a step."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.telemetry_loops import X, Y, assert_reports, expected, inner
from sample_models import step_models

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, GradientNoiseScale, microbatch
from keras_paragrad.profiling.telemetry import GradientTelemetry

OPTIMIZERS = {
    "sgd": lambda **more: keras.optimizers.SGD(0.05, momentum=0.9, **more),
    "adam": lambda **more: keras.optimizers.Adam(0.01, **more),
    "adamw": lambda **more: keras.optimizers.AdamW(0.01, weight_decay=0.1, **more),
    "rmsprop": lambda **more: keras.optimizers.RMSprop(0.01, **more),
    "lion": lambda **more: keras.optimizers.Lion(0.01, **more),
    "adafactor": lambda **more: keras.optimizers.Adafactor(0.01, **more),
    "schedule": lambda **more: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), **more),
}
CLIPS = [{"clipnorm": 0.3}, {"global_clipnorm": 0.3}, {"clipvalue": 0.05}]


def adam(**more):
    return OPTIMIZERS["adam"](**more)


def fitted(optimizer, every=1, batch_size=16, callbacks=(), epochs=1, model=None, **more):
    model = model or inner()
    model.compile(optimizer, "mse", **more)
    telemetry = GradientTelemetry(every=every)
    history = model.fit(
        X, Y, batch_size=batch_size, shuffle=False, verbose=0, epochs=epochs, callbacks=[*callbacks, telemetry]
    )
    assert "make_train_function" not in model.__dict__
    return telemetry.last, history.history, model


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name):
    last, _, _ = fitted(OPTIMIZERS[name](), run_eagerly=True)
    assert_reports(last, expected(OPTIMIZERS[name], 16), range(1, 7))


RATE = 0.05


class Weights(keras.callbacks.Callback):
    """Keeps the trainable weights before each batch, and at the end."""

    def on_train_begin(self, logs=None):
        self.kept = []

    def on_train_batch_begin(self, batch, logs=None):
        self.kept.append([weight.numpy() for weight in self.model.trainable_variables])

    def on_train_end(self, logs=None):
        self.on_train_batch_begin(0)


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (None, {}),
        pytest.param(3, {}, marks=pytest.mark.long),
        pytest.param(None, {"jit_compile": True}, marks=pytest.mark.long),
        pytest.param(None, {"run_eagerly": True}, marks=pytest.mark.long),
    ],
)
def test_updates_by_several_optimizers(size, mode):
    """A GAN's two are SGD without momentum, whose gradient is the change of a weight by the learning rate."""
    optimizer = functools.partial(keras.optimizers.SGD, RATE)
    model = step_models.compiled(step_models.Gan, optimizer=optimizer, **{"jit_compile": False, **mode})
    telemetry, weights = GradientTelemetry(every=2), Weights()
    options = {"batch_size": 11, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [telemetry, weights]}
    with microbatch(model, size) if size else contextlib.nullcontext():
        model.fit(*step_models.data_of(model), **options)
    reports = telemetry.last
    assert reports.steps.tolist() == [2, 4, 6]
    before, after = ([weights.kept[step - 1 + shift] for step in reports.steps] for shift in (0, 1))
    norms = np.array([[np.linalg.norm(weight) for weight in of_update] for of_update in before])
    pairs = zip(before, after, strict=True)
    change = np.array([[np.linalg.norm(new - old) for old, new in zip(*pair, strict=True)] for pair in pairs])
    np.testing.assert_allclose(reports.weights.weight_norm, norms, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(reports.weights.gradient_norm, change / RATE, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(reports.weights.update_ratio * norms, change, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_clipping(clip):
    last, history, _ = fitted(adam(**clip), run_eagerly=True)
    assert_reports(last, expected(adam, 16, clip=clip), range(1, 7))
    # Of the epoch, not of its last report.
    for name in ("clipped_gradient_norm", "gradient_norm", "update_ratio"):
        assert history[name] == [pytest.approx(getattr(last.model, name).mean())]
    assert history["clipped_gradient_norm"][0] < history["gradient_norm"][0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "more",
    [
        {"jit_compile": True},
        # As several steps an execution are.
        pytest.param({"jit_compile": False}, marks=pytest.mark.long),
        {"run_eagerly": True},
        {"steps_per_execution": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("every", [1, 2, 4])
def test_ways_of_compiling(more, every):
    last, _, _ = fitted(adam(), every, epochs=2, **more)
    per_call = more.get("steps_per_execution", 1)
    # Of the updates in a call the last is reported.
    by_call = {(step - 1) // per_call: step for step in range(every, 13, every)}
    assert_reports(last, expected(adam, 16, epochs=2), list(by_call.values()))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("exact", "more"),
    [
        (True, {"jit_compile": False, "steps_per_execution": 4}),
        (False, {"jit_compile": True}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((True, {"jit_compile": True}), (False, {"jit_compile": False, "steps_per_execution": 4}))
        ),
    ],
    ids=str,
)
def test_accumulation_is_reported_by_update(exact, more):
    callbacks = [ExactAccumulation()] if exact else []
    optimizer = AccumulatingOptimizer(adam(clipnorm=0.3), 2, weighting="auto" if exact else "uniform")
    last, _, _ = fitted(optimizer, 2, 8, callbacks, **more)
    assert_reports(last, expected(adam, 16, clip={"clipnorm": 0.3}), [2, 4, 6])


def test_accumulation_as_keras_has_it():
    last, _, _ = fitted(adam(gradient_accumulation_steps=2, clipnorm=0.3), 1, 8)
    assert_reports(last, expected(adam, 16, clip={"clipnorm": 0.3}), range(1, 7))


def test_slices_of_a_batch():
    model = inner()
    with microbatch(model, 4):
        telemetry = GradientTelemetry(every=3)
        model.compile(adam(), "mse")
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0, callbacks=[telemetry])
    assert_reports(telemetry.last, expected(adam, 16), [3, 6])


def test_a_train_step_of_your_own():
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    last, _, _ = fitted(adam(), 2, model=Own(inner().layers), run_eagerly=True)
    assert_reports(last, expected(adam, 16), [2, 4, 6])


def test_a_scaled_loss_and_an_update_that_overflowed():
    optimizer = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**127, dynamic_growth_steps=10**6)
    last, history, model = fitted(optimizer, 1, epochs=3, loss_weights=64.0)
    updates = int(model.optimizer.iterations)
    # Some of the first batches overflow, halve the scale, and are no updates.
    assert 6 < updates < 18
    assert last.steps[-1] == updates
    assert np.isfinite(last.weights.gradient_norm).all()
    assert history["loss_scale"][-1] == float(model.optimizer.dynamic_scale) == last.loss_scale[-1]
    quiet = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=1024.0)
    last, _, _ = fitted(quiet, 2, run_eagerly=True)
    assert_reports(last, expected(adam, 16), [2, 4, 6])


def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        last, _, _ = fitted(adam(), 2, run_eagerly=True)
    finally:
        keras.config.set_dtype_policy("float32")
    wanted = expected(adam, 16)
    norms = np.array([wanted[step - 1][1] for step in last.steps])
    np.testing.assert_allclose(last.weights.gradient_norm, norms, rtol=0.05, atol=0.02 * norms.max())


def test_data_of_unknown_length_and_a_second_fit():
    model = inner()
    # Tracing takes longer than the steps.
    model.compile(adam(), "mse", run_eagerly=True)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).filter(lambda x, y: True)
    telemetry = GradientTelemetry(every=4)
    model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[telemetry])
    wanted = expected(adam, 16, epochs=3)
    assert_reports(telemetry.last, wanted, [4, 8, 12])
    model.fit(data, shuffle=False, verbose=0, callbacks=[telemetry])
    assert_reports(telemetry.last, wanted, [4, 8, 12, 16])


@pytest.mark.long
def test_it_goes_with_the_noise_scale_and_changes_no_weight():
    plain = inner()
    plain.compile(AccumulatingOptimizer(adam(), 2), "mse", run_eagerly=True)
    plain.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    noise = GradientNoiseScale()
    last, _, model = fitted(AccumulatingOptimizer(adam(), 2), 2, 8, [ExactAccumulation(), noise], run_eagerly=True)
    assert_reports(last, expected(adam, 16), [2, 4, 6])
    assert noise.noise.signal != 0
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_embedding_whose_rows_come_up_twice():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Embedding(4, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.array([[0, 0, 1], [2, 1, 1]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - 1.0) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    norms = [np.linalg.norm(np.array(tf.convert_to_tensor(gradient))) for gradient in gradients]
    telemetry = GradientTelemetry(every=1)
    model.fit(x, np.ones((2, 1)), verbose=0, callbacks=[telemetry])
    np.testing.assert_allclose(telemetry.last.weights.gradient_norm, [norms], rtol=1e-5)


REPLICAS = {
    "stock": lambda: adam(),
    "clipvalue": lambda: adam(clipvalue=1e3),
    "accumulation": lambda: AccumulatingOptimizer(adam(clipnorm=0.3), 2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(adam(), initial_scale=8.0),
}


def check_on_replicas(mirrored, kind, distributed):
    with mirrored.scope():
        model = inner()
        model.compile(REPLICAS[kind](), "mse", **({"steps_per_execution": 2} if distributed else {}))
    telemetry = GradientTelemetry(every=2)
    accumulates = kind == "accumulation"
    batch, callbacks = (8 if accumulates else 16), [telemetry]
    if accumulates:
        callbacks.insert(0, ExactAccumulation())
    fit = DistributedFit(strategy=mirrored).fit if distributed else type(model).fit
    fit(model, X, Y, batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks)
    clip = {"clipnorm": 0.3} if accumulates else None
    assert_reports(telemetry.last, expected(adam, 16, clip=clip), [2, 4, 6])


@pytest.mark.long
@pytest.mark.own_process(seconds=240)
def test_two_replicas(mirrored):
    check_on_replicas(mirrored, "accumulation", distributed=True)


@pytest.mark.long
@pytest.mark.own_process(seconds=240)
def test_two_replicas_the_other_way(mirrored):
    for kind in ("accumulation", "clipvalue", "stock", "scaled"):
        check_on_replicas(mirrored, kind, distributed=False)
    for kind in ("stock", "clipvalue", "scaled"):
        check_on_replicas(mirrored, kind, distributed=True)


# In `make test`, the replicas above clip each window.
@pytest.mark.long
@pytest.mark.own_process(seconds=240)
def test_two_replicas_that_clip(mirrored):
    with mirrored.scope():
        model = inner()
        model.compile(adam(clipnorm=0.3), "mse", jit_compile=True)
    telemetry = GradientTelemetry(every=1)
    dist = DistributedFit(strategy=mirrored)
    dist.fit(model, X, Y, batch_size=16, shuffle=False, verbose=0, callbacks=[telemetry])
    assert_reports(telemetry.last, expected(adam, 16, clip={"clipnorm": 0.3}), range(1, 7))
