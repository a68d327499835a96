"""What is trained, built or compiled in another way than on replicas is possible, said in our words."""

import functools
import warnings

import keras
import numpy as np
import pytest
from oracles.whole_batches import largest_difference
from sample_models import step_models

from keras_paragrad import DistributedFit, microbatch

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = X[:, :1] ** 2


def build(compiled=True, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    if compiled:
        model.compile(keras.optimizers.SGD(0.05, clipnorm=0.1), "mse", metrics=["mae"], **options)
    return model


class Compiles(keras.callbacks.Callback):
    """Trains another layer from the second epoch on."""

    def __init__(self, within=None, **options):
        super().__init__()
        self.within, self.options = within, options

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.layers[0].trainable = False
            if self.within is None:
                self.compile()
            else:
                with self.within.scope():
                    self.compile()

    def compile(self):
        self.model.compile(keras.optimizers.SGD(0.05, clipnorm=0.1), "mse", metrics=["mae"], **self.options)
        self.model.make_train_function()


def fit(fit, callbacks=(), epochs=2):
    return fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)).history


@pytest.mark.own_process(seconds=120)
def test_a_model_that_was_not_prepared_or_compiled_elsewhere(mirrored, tmp_path):
    dist = DistributedFit(mirrored)
    with dist.scope():
        model, other = build(), build(compiled=False)
    with pytest.warns(UserWarning, match=r"not prepared, .* Write dist.fit\(model, ...\) or, .* dist.prepare\(model\)"):
        fit(model.fit)
    fit(model.fit)
    other.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"compiled outside of it.* `with dist.scope\(\): model.compile\(...\)`"):
        dist.prepare(other)
    outside = [keras.optimizers.SGD(name=name) for name in ("of_d", "of_g")]
    with dist.scope():
        model = step_models.Gan()
        model.compile(*outside)
    with pytest.raises(ValueError, match="of_d, of_g, optimizers of .* were created outside of the scope"):
        dist.prepare(model)
    with dist.scope():
        model = build()
    with pytest.raises(ValueError, match=r"`with dist.scope\(\): model.compile\(...\)`, .* also in a callback"):
        fit(functools.partial(dist.fit, model), [Compiles()])
    # Tracing takes longer than the steps.
    one = build(run_eagerly=True)
    fit(one.fit, [Compiles(run_eagerly=True)], epochs=3)
    with dist.scope():
        model = build()
    fit(functools.partial(dist.fit, model), [Compiles(dist)], epochs=3)
    assert largest_difference(model, one) < 1e-6
    # The fit that Keras resumes is that of one device, too.
    with dist.scope():
        model = build()
    stops = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 1 and 1 / 0)
    train = functools.partial(dist.fit, model)
    with pytest.raises(ZeroDivisionError):
        fit(train, [keras.callbacks.BackupAndRestore(tmp_path), stops])
    model.set_weights([weight * 0 for weight in model.get_weights()])
    fit(train, [keras.callbacks.BackupAndRestore(tmp_path)])
    one = build(run_eagerly=True)
    fit(one.fit)
    assert largest_difference(model, one) < 1e-6


@pytest.mark.long
@pytest.mark.own_process
def test_nothing_is_said_of_prepared_models_and_of_one_replica(mirrored):
    dist, alone = DistributedFit(mirrored), DistributedFit("none")
    with dist.scope():
        model = build()
    with alone.scope():
        other = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.prepare(model)
        fit(model.fit)
        fit(other.fit)


def stateful():
    model = keras.Sequential([keras.Input((3, 2), batch_size=4), keras.layers.LSTM(2, stateful=True)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.long
@pytest.mark.own_process
def test_a_state_of_each_row_can_not_be_divided(mirrored):
    dist = DistributedFit(mirrored)
    with dist.scope():
        model = stateful()
    with pytest.raises(ValueError, match=r"LSTM\(stateful=True\), 'lstm', .* each of 2 replicas gets parts of it"):
        dist.prepare(model)
    model = stateful()
    data = np.ones((8, 3, 2), "float32"), np.ones((8, 2), "float32")
    with microbatch(model, size=4):
        model.fit(*data, batch_size=4, verbose=0)
    with (
        microbatch(model, size=2),
        pytest.raises(ValueError, match=r"slices are parts of it. Write stateful=False, or"),
    ):
        model.fit(*data, batch_size=4, verbose=0)
