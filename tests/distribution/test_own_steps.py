"""What steps and metrics of a model's own show on replicas, beside one device."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.histories import MicroBatches
from oracles.whole_batches import largest_difference
from sample_models import own_steps

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch

TWO_REPLICAS = ["CPU:0", "CPU:1"]
# In `make test`, test_shown_by_workers.py has "Tracking". What else is left out differs from these in its options.
FEW = ("Guide", "Loss", "Counted", "Counted, sum")


def on_replicas(**options):
    return DistributedFit(devices=TWO_REPLICAS, jit=False, **options)


@pytest.mark.own_process
@pytest.mark.parametrize(
    ("cases", "in_graphs"),
    [(FEW, ("Guide",)), pytest.param(own_steps.CASES, ("Loss", "Tracking"), marks=pytest.mark.long)],
    ids=["few", "all"],
)
def test_own_test_steps_show_what_one_device_shows(cases, in_graphs):
    for case in cases:
        # The others differ in what they are weighted by.
        mode = {} if case in in_graphs else {"run_eagerly": True}
        found, expected = (own_steps.evaluated(case, dist, **mode) for dist in (on_replicas, None))
        assert found == pytest.approx(expected, rel=1e-6), (case, mode)


@pytest.mark.own_process
def test_numbers_of_whole_batches_need_to_be_told_what_they_divide_by():
    dist = on_replicas()
    with dist.scope():
        model = own_steps.model(own_steps.Loss, run_eagerly=True)
    dist.prepare(model)
    with pytest.raises(ValueError, match=r"normalizer of the update of 'own' is unknown.*\(..., weighting='examples'"):
        model.evaluate(dist.dataset(*own_steps.data(), batch_size=7), verbose=0)


@pytest.mark.own_process
def test_a_number_that_parts_of_a_batch_do_not_give_is_refused():
    says = r"CountedOnce gives the update of 'own_mean' a number.*Write sample_weight=keras.ops.shape\(x\)\[0\]"
    for options in ({}, {"weighting": "examples"}):
        dist = on_replicas(**options)
        with dist.scope():
            model = own_steps.model(own_steps.CountedOnce, run_eagerly=True, metrics=None)
        dist.prepare(model)
        with pytest.raises(ValueError, match=says):
            model.evaluate(dist.dataset(*own_steps.data(), own_steps.data()[0][:, 0], batch_size=7), verbose=0)


@pytest.mark.own_process
def test_own_train_steps_show_the_mean_over_the_examples():
    class Own(own_steps.Loss):
        def train_step(self, data):
            return self.test_step(data)

    shown = []
    for dist in (on_replicas(exact=False), None):
        with dist.scope() if dist else keras.name_scope("alone"):
            model = own_steps.model(Own, run_eagerly=True)
        if dist:
            dist.prepare(model)
        batches = MicroBatches(own_steps.data(), (7, 7, 1))
        shown.append(model.fit(dist.dataset(batches) if dist else batches, shuffle=False, verbose=0).history)
    found, expected = shown
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)


def shown_in_training(made, dist=None, size=None, steps=None, sizes=None):
    """What an epoch shows of a step of the model's own, with weights that stay as they are."""
    with dist.scope() if dist else contextlib.nullcontext():
        model = own_steps.model(made, metrics=None)
        optimizer = keras.optimizers.SGD(0.0)
        model.compile(AccumulatingOptimizer(optimizer, steps=steps) if steps else optimizer, jit_compile=False)
    if dist:
        dist.prepare(model)
    sizes = sizes or ((3, 2, 2, 3, 3, 2) if steps else (3, 7, 5))
    batches = MicroBatches(own_steps.data(), sizes)
    callbacks = [ExactAccumulation()] if steps else []
    with microbatch(model, size) if size else contextlib.nullcontext():
        options = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
        return model.fit(dist.dataset(batches) if dist else batches, **options).history


@pytest.mark.own_process
@pytest.mark.parametrize("made", [own_steps.Numbers, pytest.param(own_steps.SummedNumbers, marks=pytest.mark.long)])
def test_numbers_that_an_own_train_step_gives_to_metrics_or_returns(made):
    expected = shown_in_training(made)
    assert expected["sum_of_batches"] == [3]
    for options in ({"dist": on_replicas()}, {"size": 3}, {"dist": on_replicas(), "size": 2}):
        found = shown_in_training(made, **options)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-5), (name, options)


@pytest.mark.own_process
def test_numbers_of_an_own_train_step_that_is_not_exact():
    found, expected = (
        shown_in_training(own_steps.Numbers, on_replicas(exact=False)),
        shown_in_training(own_steps.Numbers),
    )
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.own_process
def test_sums_in_windows_are_those_of_whole_batches():
    expected = shown_in_training(own_steps.Sums)
    alone, replicas = (shown_in_training(own_steps.Sums, dist, steps=3) for dist in (None, on_replicas()))
    for name in ("sum_of_sums", "sum_of_rows"):
        assert alone[name] == pytest.approx(expected[name], rel=1e-5), name
    # Others are a micro-batch's, which replicas divide.
    for name, value in alone.items():
        assert replicas[name] == pytest.approx(value, rel=1e-5), name
    with pytest.raises(ValueError, match=r"train_step of Numbers gives the update of 'sum_of_means' a number.*not the"):
        shown_in_training(own_steps.Numbers, steps=3)


@pytest.mark.own_process
def test_a_replica_without_rows_adds_nothing_to_metrics_before_the_end_of_a_window():
    class Hidden(own_steps.Loss):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = keras.ops.mean(keras.ops.square(y - y_pred))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            self.hidden.update_state(y, y_pred)
            return {"hidden": self.hidden.result()}

    shown = (shown_in_training(Hidden, dist, steps=2, sizes=(1, 7, 1, 6)) for dist in (on_replicas(), None))
    found, expected = (history["hidden"] for history in shown)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.own_process
def test_a_number_that_no_parts_give_is_not_added():
    says = r"train_step of Largest gives the update of 'sum_of_sums' a number.*metric.update_state\(values\)"
    for options in ({"dist": on_replicas()}, {"size": 3}, {"steps": 3}):
        with pytest.raises(ValueError, match=says):
            shown_in_training(own_steps.Largest, **options)


@pytest.mark.own_process
def test_a_mean_that_counts_batches_once_by_a_weight_is_refused_in_training():
    class Once(own_steps.Loss):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(y - self(x)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            self.tracker.update_state(loss, sample_weight=1.0)
            return {"own": self.tracker.result()}

    says = r"train_step of Once gives the update of 'own' a number.*Write sample_weight=keras.ops.shape\(x\)\[0\]"
    for options in ({"dist": on_replicas()}, {"size": 3}):
        with pytest.raises(ValueError, match=says):
            shown_in_training(Once, **options)


def fitted(made, parts):
    model = own_steps.model(made, run_eagerly=True)
    with microbatch(model, parts):
        return model.fit(*own_steps.data(), batch_size=7, shuffle=False, verbose=0).history


def test_what_compute_metrics_adds_has_to_be_had_of_parts():
    expected = fitted(own_steps.PerplexityOfParts, 100)
    assert "perplexity" in expected
    assert fitted(own_steps.PerplexityOfParts, 3)["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    # Of whole batches, Keras's way is kept.
    assert fitted(own_steps.Perplexity, 100)["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    with pytest.raises(ValueError, match="compute_metrics of Perplexity returns.*Override that too"):
        fitted(own_steps.Perplexity, 3)


def test_what_compute_metrics_leaves_out_is_left_out_of_parts():
    expected, found = fitted(own_steps.WithoutError, 100), fitted(own_steps.WithoutError, 3)
    assert found.keys() == expected.keys() == {"loss"}
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


class Gan(keras.Model):
    """Two models and their optimizers; neither the model itself nor its own optimizer is used."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)])
        self.judge = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])

    def compile(self, **optimizers):
        super().compile()
        self.optimizers = optimizers

    def train_step(self, data):
        real, noise = data
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        ones, zeros = tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(real)[0], 1))
        for name in ("judge", "maker"):
            with tf.GradientTape() as tape:
                judged = self.judge(self.maker(noise))
                fooled = entropy(ones, judged)
                loss = entropy(ones, self.judge(real)) + entropy(zeros, judged) if name == "judge" else fooled
            weights = getattr(self, name).trainable_weights
            self.optimizers[name].apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {}


class GanOfNoise(Gan):
    def call(self, noise):
        return self.maker(noise)


@pytest.mark.few(1)
@pytest.mark.own_process
@pytest.mark.parametrize("kind", [Gan, GanOfNoise])
def test_models_whose_own_step_does_not_call_them(kind):
    generator = np.random.default_rng(0)
    real, noise = (generator.normal(size=(16, width)).astype("float32") for width in (6, 3))

    def trained(dist):
        with dist.scope():
            keras.utils.set_random_seed(0)
            model = kind()
            model.compile(judge=keras.optimizers.Adam(0.01), maker=keras.optimizers.SGD(0.1))
        dist.fit(model, real, noise, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model

    # Of even batches without clips, the sum of the replicas' gradients is that of one device.
    assert largest_difference(trained(on_replicas(exact=False)), trained(DistributedFit("none"))) < 1e-6
