"""`GradientNoiseScale` and `ExampleGradients`."""

import csv
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracles.whole_batches import example_gradients, norms_of
from sample_models.drawn_layers import some_inputs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from keras_paragrad import (
    AccumulatingOptimizer,
    ExactAccumulation,
    ExampleGradients,
    GradientNoiseScale,
    PerExampleGradients,
    per_example_gradients,
    wrap,
)

ROWS = 480
GENERATOR = np.random.default_rng(0)
X = (GENERATOR.normal(size=(ROWS, 6)) + 1).astype("float32")
Y = GENERATOR.normal(size=(ROWS, 1)).astype("float32")


def inner():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])


@functools.cache
def flat_gradients():
    gradients = per_example_gradients(inner(), X, Y, "mse")
    return np.concatenate([gradient.reshape(ROWS, -1) for gradient in gradients], 1).astype("float64")


def estimate(small, of_small, large, of_large):
    """Signal and variance from the mean squared norms of gradients over so many examples each."""
    variance = (small - large) / (1 / of_small - 1 / of_large)
    return large - variance / of_large, variance


def expected(batches, parts, decay):
    """The bias-corrected average over batches of the estimates from their parts.

    Args:
        batches: How many examples each batch has.
        parts: How many examples each of its parts has.
        decay: What is left of the average at each update.
    """
    gradients, average, weight = flat_gradients(), np.zeros(2), 0.0
    for start in range(0, ROWS, batches):
        batch = gradients[start : start + batches]
        means = [batch[part : part + parts].mean(0) for part in range(0, batches, parts)]
        small = np.mean([np.square(mean).sum() for mean in means])
        found = estimate(small, parts, np.square(batch.mean(0)).sum(), batches)
        average = decay * average + (1 - decay) * np.array(found)
        weight = decay * weight + (1 - decay)
    return average / weight


def fitted(model, optimizer, batch_size, callbacks=(), decay=0.8, loss=None, **more):
    model.compile(optimizer, loss or keras.losses.MeanSquaredError(), **more)
    noise = GradientNoiseScale(decay=decay)
    history = model.fit(X, Y, batch_size=batch_size, shuffle=False, verbose=0, callbacks=[noise, *callbacks])
    return noise.noise, history.history


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [{"jit_compile": False}, {"steps_per_execution": 5}, {"run_eagerly": True}], ids=str)
def test_from_single_examples(more):
    noise, history = fitted(wrap(inner()), keras.optimizers.SGD(0.0), 48, **more)
    np.testing.assert_allclose([noise.signal, noise.variance], expected(48, 1, 0.8), rtol=1e-4)
    assert history["gradient_noise_scale"] == [noise.scale]
    assert history["gradient_signal"] == [noise.signal]
    assert history["gradient_variance"] == [noise.variance]


@pytest.mark.parametrize(
    ("exact", "reduction"), [(True, "sum_over_batch_size"), (True, "sum"), (False, "sum_over_batch_size")]
)
def test_from_accumulation(exact, reduction):
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.0), 4, weighting="auto" if exact else "uniform")
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    noise, _ = fitted(inner(), optimizer, 12, [ExactAccumulation()] if exact else [], loss=loss)
    np.testing.assert_allclose([noise.signal, noise.variance], expected(48, 12, 0.8), rtol=2e-3)


def test_a_loss_scale_is_divided_out():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=64.0)
    noise, _ = fitted(wrap(inner()), optimizer, 48)
    np.testing.assert_allclose([noise.signal, noise.variance], expected(48, 1, 0.8), rtol=1e-4)


# In `make test`, test_replicas.py has the gradients that it comes from.
@pytest.mark.long
@pytest.mark.own_process(seconds=200)
def test_from_replicas(mirrored):
    for wrapped in (False, True):
        with mirrored.scope():
            model = wrap(inner()) if wrapped else inner()
            # One of them is traced.
            model.compile(keras.optimizers.SGD(0.0), keras.losses.MeanSquaredError(), run_eagerly=wrapped)
        noise = GradientNoiseScale(decay=0.8)
        model.fit(X, Y, batch_size=48, shuffle=False, verbose=0, callbacks=[noise])
        found = [noise.noise.signal, noise.noise.variance]
        parts = 1 if wrapped else 24
        np.testing.assert_allclose(found, expected(48, parts, 0.8), rtol=2e-3, err_msg=f"parts of {parts}")
    with mirrored.scope():
        clipped = inner()
        clipped.compile(keras.optimizers.SGD(0.0, clipnorm=1.0), "mse")
    with pytest.raises(ValueError, match=r"AccumulatingOptimizer\(optimizer, steps=1\)"):
        clipped.fit(X, Y, verbose=0, callbacks=[noise])


@pytest.mark.long
def test_training_is_the_same_with_it():
    weights = []
    for callbacks in ([], [GradientNoiseScale()]):
        model = wrap(inner())
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        model.fit(X, Y, shuffle=False, verbose=0, callbacks=callbacks)
        assert "make_train_function" not in model.__dict__
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
def test_a_second_fit_goes_on_and_one_without_it_does_not():
    model = wrap(inner())
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, Y, batch_size=48, verbose=0)
    noise = GradientNoiseScale(decay=0.5, update_freq=2)
    seen = []
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append("gradient_signal" in logs))
    model.fit(X, Y, batch_size=48, shuffle=False, verbose=0, callbacks=[noise, see])
    assert seen == [False, True] * 5
    first = noise.noise
    model.fit(X, Y, batch_size=48, shuffle=False, verbose=0)
    assert noise.noise == first
    model.fit(X, Y, batch_size=48, shuffle=False, verbose=0, callbacks=[noise])
    assert noise.noise != first


def test_its_logs_reach_a_csv_file_and_tensorboard(tmp_path):
    model = wrap(inner())
    model.compile("sgd", "mse")
    writers = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path)]
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[GradientNoiseScale(), *writers])
    events = EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert len(events.Tensors("epoch_gradient_noise_scale")) == 2
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [float(row["gradient_noise_scale"]) > 0 for row in rows] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"source": "all"}, "'examples', 'accumulation'"), ({"decay": 1}, "decay=0.99"), ({"update_freq": 0}, "'epoch'")],
)
def test_arguments_of_the_noise_scale(arguments, says):
    with pytest.raises(ValueError, match=says):
        GradientNoiseScale(**arguments)


@pytest.mark.parametrize("options", [None, {"clip_norm": 1.0}, {"quantity": "second_moment"}])
def test_a_model_without_a_source(options):
    model = inner() if options is None else wrap(inner(), **options)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"keras_paragrad.wrap\(model\)"):
        model.fit(X, Y, verbose=0, callbacks=[GradientNoiseScale()])


def test_the_norms_of_an_epoch():
    model = wrap(inner(), clip_norm=2.0)
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    examples = ExampleGradients(quantiles=(0.25, 0.5), largest=5, bins=7)
    assert examples.clip_fraction is None and examples.largest_norms == []
    history = model.fit(X, Y, batch_size=50, shuffle=False, verbose=0, callbacks=[examples]).history
    theirs = norms_of(example_gradients(inner(), X, lambda y_pred, y: tf.reduce_mean((y_pred - y) ** 2), Y))
    np.testing.assert_allclose(examples.norms, theirs, rtol=1e-4)
    order = np.argsort(-theirs)[:5]
    assert [index for index, _ in examples.largest_norms] == list(order)
    np.testing.assert_allclose([norm for _, norm in examples.largest_norms], theirs[order], rtol=1e-4)
    np.testing.assert_allclose(examples.quantiles_of_norms, np.quantile(theirs, (0.25, 0.5)), rtol=1e-4)
    assert history["example_norm_quantile_25"] == [examples.quantiles_of_norms[0]]
    assert history["example_clip_fraction"] == [np.mean(theirs > 2.0)]
    counts, edges = examples.histogram
    assert counts.sum() == ROWS
    assert len(edges) == 8


@pytest.mark.parametrize(
    ("make", "more", "says"),
    [
        (inner, {}, r"keras_paragrad.wrap\(model\)"),
        (lambda: wrap(inner(), quantity="second_moment"), {}, "quantity='norms'"),
        (lambda: wrap(inner()), {"steps_per_execution": 2}, "steps_per_execution=1"),
    ],
)
def test_models_of_which_examples_are_not_to_be_seen(make, more, says):
    model = make()
    model.compile("sgd", "mse", **more)
    with pytest.raises(ValueError, match=says):
        model.fit(X, Y, verbose=0, callbacks=[ExampleGradients()])


def test_the_layer_that_is_named():
    first, second = PerExampleGradients(layers.Dense(2)), PerExampleGradients(layers.Dense(1))
    model = keras.Sequential([keras.Input((3,)), first, second])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    callbacks = [ExampleGradients(), ExampleGradients(second)]
    model.fit(some_inputs((4, 3)), np.ones((4, 1)), verbose=0, callbacks=callbacks)
    for callback, layer in zip(callbacks, (first, second), strict=True):
        np.testing.assert_array_equal(callback.norms, layer.norms)
