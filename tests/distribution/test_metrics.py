"""All of `keras.metrics`, and `*_on_batch`, on the collectives of several workers against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sample_models.every_metric import all_metrics, assert_same, data, model_with

from keras_paragrad import DistributedFit
from keras_paragrad.compat.workers import NamedDevicesStrategy


def on_the_ring_of_workers():
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return DistributedFit(strategy=NamedDevicesStrategy(("CPU:0", "CPU:1"), options), jit=False)


@pytest.mark.own_process
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_every_metric_is_that_of_one_device(every):
    x, y = data()
    dist = on_the_ring_of_workers()
    with dist.scope():
        model = model_with(all_metrics(every), run_eagerly=True)
    dist.prepare(model)
    found = model.evaluate(dist.dataset(x, y, batch_size=8), verbose=0, return_dict=True)
    expected = model_with(all_metrics(every), run_eagerly=True).evaluate(
        x, y, batch_size=8, verbose=0, return_dict=True
    )
    assert len(expected) > 40 / every
    assert_same(found, expected)


class OfLoss(keras.metrics.Metric):
    """Calls a loss, as a perplexity does."""

    def __init__(self):
        super().__init__(name="of_loss")
        self.loss = keras.losses.MeanSquaredError()
        self.total, self.count = (self.add_variable((), "zeros", name=name) for name in ("total", "count"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = keras.ops.cast(keras.ops.shape(y_true)[0], "float32")
        self.total.assign_add(rows * self.loss(y_true, y_pred))
        self.count.assign_add(rows)

    def result(self):
        return self.total / self.count


@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore:The results of the metrics object")
def test_losses_in_metrics_are_those_of_one_device(mirrored):
    shown = []
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    for dist in (DistributedFit("none"), DistributedFit(mirrored)):
        keras.utils.set_random_seed(0)
        with dist.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[keras.losses.MeanSquaredError(name="object"), OfLoss()])
        options = {"batch_size": 8, "verbose": 0, "validation_data": (x, x[:, :1])}
        shown.append(dist.fit(model, x, x[:, :1], **options).history)
    for name, values in shown[0].items():
        np.testing.assert_allclose(shown[1][name], values, rtol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.own_process
def test_batches_that_come_whole_are_counted_once(mirrored):
    x, y = data()

    def counting():
        return model_with({"rows": [keras.metrics.TruePositives(name="hits"), "mae"]}, run_eagerly=True)

    plain = counting()
    dist = DistributedFit(strategy=mirrored, jit=False)
    with dist.scope():
        model = counting()
    dist.prepare(model)
    # The last of them leaves a replica without a row.
    for rows in (7, 4, 1):
        part = x[:rows], {name: column[:rows] for name, column in y.items()}
        weights = {name: np.linspace(0.5, 2, rows, dtype="float32") for name in y}
        for name in ("train_on_batch", "test_on_batch"):
            found, expected = (
                getattr(each, name)(*part, sample_weight=weights, return_dict=True) for each in (model, plain)
            )
            assert_same(found, expected)
        found, expected = (each.predict_on_batch(part[0]) for each in (model, plain))
        assert_same(found, expected)


@pytest.mark.few(1)
@pytest.mark.own_process
@pytest.mark.parametrize("method", ["predict", "predict_on_batch"])
def test_xla_predicts_with_a_model_that_is_not_built(mirrored, method):
    dist = DistributedFit(strategy=mirrored)
    with dist.scope():
        model = keras.Sequential([keras.layers.Dense(3, kernel_initializer="ones")])
        model.compile(loss="mse", jit_compile=True)
    dist.prepare(model)
    np.testing.assert_allclose(getattr(model, method)(np.ones((5, 4))), np.full((5, 3), 4.0))
