"""Validation with data of another kind than that of training, batch by batch as Keras takes it."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import DistributedFit

X, Y = np.zeros((16, 2), "float32"), np.zeros((16, 1), "float32")


def batch(number):
    return np.zeros((4, 2), "float32"), np.full((4, 1), number, "float32")


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return batch(index)


def generator(batches=4):
    yield from map(batch, range(batches))


def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    # What is shown of a validation is the mean of its batches' numbers.
    model.compile(keras.optimizers.SGD(0.0), "mae")
    return model


def numbers(fit, data, steps, epochs=2):
    given = {"batch_size": 8, "epochs": epochs, "validation_data": data, "validation_steps": steps}
    return fit(X, Y, verbose=0, **given).history["val_loss"]


@pytest.mark.long
@pytest.mark.own_process(seconds=200)
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_validation_takes_the_batches_that_keras_takes(mirrored):
    dists = [DistributedFit("none"), DistributedFit(mirrored)]
    models = []
    for dist in dists:
        with dist.scope():
            models.append(build())
    one = build()
    arrays = lambda: tuple(map(np.concatenate, zip(*generator(), strict=True)))  # noqa: E731
    datasets = lambda: tf.data.Dataset.from_tensor_slices(arrays()).batch(4)  # noqa: E731
    for make, steps in ((datasets, None), (Batches, 2), (generator, 2)):
        expected = numbers(one.fit, make(), steps)
        for dist, model in zip(dists, models, strict=True):
            assert numbers(functools.partial(dist.fit, model), make(), steps) == expected
    # Of what a validation doesn't take, Keras loses as much as it happens to have read ahead.
    for dist, model in zip(dists, models, strict=True):
        assert numbers(functools.partial(dist.fit, model), generator(100), 4) == [1.5, 2.5]


def test_a_size_of_validation_batches_that_are_batches_already_is_refused():
    model, data = build(), Batches()
    with pytest.raises(ValueError, match="batch_size=4 is given for a Batches, which has to be batched already"):
        DistributedFit("none").fit(model, X, Y, batch_size=8, validation_data=data, validation_batch_size=4, verbose=0)


@pytest.mark.own_process
def test_an_evaluation_in_a_callback_tries_nothing_again_that_training_has_tried(mirrored):
    traces, counts = 0, []

    def loss(y_true, y_pred):
        nonlocal traces
        traces += 1
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            before = traces
            self.model.evaluate(X, Y, batch_size=8, verbose=0)
            counts.append(traces - before)

    dist = DistributedFit(mirrored)
    with dist.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss)
    dist.fit(model, X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[Evaluate()])
    # Once on each of two replicas, as without DistributedFit, once to prove the first batch, and once to see whether
    # the loss has to be that of whole batches.
    assert counts == [4, 0]
