"""`ExactAccumulation(steps=...)` does what an `AccumulatingOptimizer` and `ExactAccumulation()` do, and unwraps it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference
from sample_models.cases import DataCase, build_model

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation
from keras_paragrad.compat.optimizer import held_optimizers

DATA = DataCase((2, 4, 4, 2, 6), seed=1)


def adam():
    return keras.optimizers.Adam(0.01, clipnorm=0.05)


def train(model, *callbacks, **arguments):
    return model.fit(DATA.dataset(), shuffle=False, verbose=0, callbacks=list(callbacks), **arguments)


class Sees(keras.callbacks.Callback):
    """Notes the optimizer that a callback sees, though it comes first."""

    def on_train_begin(self, logs=None):
        self.seen = self.model.optimizer


class BreakOff(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


@pytest.mark.few(0, "flush")
@pytest.mark.parametrize("tail", ["flush", "carry"])
def test_as_with_both(tail):
    both = build_model(lambda: AccumulatingOptimizer(adam(), 3, tail=tail), run_eagerly=tail == "carry")
    one = build_model(adam, run_eagerly=tail == "carry")
    own, methods = one.optimizer, {name for name, value in vars(one).items() if callable(value)}
    for _ in range(2):
        sees = Sees()
        expected = train(both, ExactAccumulation()).history
        shown = train(one, sees, ExactAccumulation(steps=3, tail=tail)).history
        np.testing.assert_allclose(shown["loss"], expected["loss"], rtol=1e-6)
        assert isinstance(sees.seen, AccumulatingOptimizer)
        assert one.optimizer is own
        assert int(own.iterations) == int(both.optimizer.iterations)
    assert largest_difference(both, one) == 0.0
    assert held_optimizers(own) == [own]
    assert {name for name, value in vars(one).items() if callable(value)} == methods


@pytest.mark.parametrize("method", ["predict", "evaluate"])
def test_outside_of_fit_the_optimizer_is_the_users(method):
    model = build_model(adam, run_eagerly=True)
    own = model.optimizer
    data = DATA.dataset() if method == "evaluate" else DATA.dataset().map(lambda x, *_: x)
    getattr(model, method)(data, verbose=0, callbacks=[ExactAccumulation(steps=3)])
    assert model.optimizer is own


def test_after_a_fit_that_broke_off_the_optimizer_is_the_users():
    model = build_model(adam, run_eagerly=True)
    own = model.optimizer
    with pytest.raises(KeyboardInterrupt):
        train(model, ExactAccumulation(steps=3), BreakOff())
    # What `fit` has left behind passes gradients on.
    model.optimizer.apply([tf.ones_like(weight.value) for weight in model.trainable_weights], model.trainable_weights)
    assert int(own.iterations) == 1
    train(model)
    assert model.optimizer is own
    assert int(own.iterations) == 6


def test_under_a_loss_scale():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, dtype="mixed_float16")])
    model.compile(keras.optimizers.LossScaleOptimizer(adam(), initial_scale=4.0), "mse", run_eagerly=True)
    outer, inner = model.optimizer, model.optimizer.inner_optimizer
    train(model, ExactAccumulation(steps=3))
    assert model.optimizer is outer
    assert outer.inner_optimizer is inner
    assert int(inner.iterations) == 2


def test_a_file_of_an_open_window_has_the_window_and_another_the_users_optimizer(tmp_path):
    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.save(tmp_path / f"{batch}.keras")

    model = build_model(adam, run_eagerly=True)
    train(model, ExactAccumulation(steps=3), Save())
    closed, opened = (keras.models.load_model(tmp_path / f"{batch}.keras") for batch in (2, 3))
    assert type(closed.optimizer) is keras.optimizers.Adam
    assert int(opened.optimizer.window.position) == 1
    opened.run_eagerly = True
    rest = DATA.batches()[4:]
    data = tf.data.Dataset.from_generator(lambda: iter(rest), output_signature=DATA.dataset().element_spec)
    opened.fit(data, shuffle=False, verbose=0, callbacks=[ExactAccumulation(steps=3)])
    assert largest_difference(opened, model) < 1e-6


def test_on_replicas_and_in_fit_of_distributed_fit():
    dist = DistributedFit("mirrored", devices=["CPU:0"])
    with dist.scope():
        model = build_model(adam, run_eagerly=True, strategy=dist.strategy)
    own = model.optimizer
    dist.fit(model, DATA.dataset(), verbose=0, shuffle=False, callbacks=[ExactAccumulation(steps=3)])
    assert model.optimizer is own
    whole = build_model(adam, run_eagerly=True)
    train(whole, ExactAccumulation(steps=3))
    assert largest_difference(model, whole) < 1e-6


def test_the_order_of_the_data_is_followed_through():
    orders = []
    for make, exact in ((lambda: AccumulatingOptimizer(adam(), 3), ()), (adam, (3,))):
        model = build_model(make, run_eagerly=True)
        dist = DistributedFit("none", deterministic=2)
        for _ in range(2):
            dist.fit(model, DATA.dataset(), verbose=0, shuffle=False, callbacks=[ExactAccumulation(*exact)])
        orders.append(model.optimizer.data_order.state.numpy())
    np.testing.assert_array_equal(*orders)


@pytest.mark.filterwarnings("always")
def test_another_number_of_steps():
    model = build_model(adam, run_eagerly=True)
    train(model, ExactAccumulation(steps=3, tail="carry"))
    with pytest.warns(UserWarning, match="left a window open"):
        train(model, ExactAccumulation(steps=2))
    assert int(model.optimizer.iterations) == 1 + 3


def test_refusals():
    with pytest.raises(ValueError, match=r"ExactAccumulation\(tail='carry'\) needs `steps`"):
        ExactAccumulation(tail="carry")
    with pytest.raises(ValueError, match="`steps` is 0"):
        ExactAccumulation(steps=0)
    with pytest.raises(ValueError, match="states `steps` as well"):
        train(build_model(lambda: AccumulatingOptimizer(adam(), 2)), ExactAccumulation(steps=3))
    with pytest.raises(ValueError, match=r"callbacks=\[keras_paragrad.ExactAccumulation\(steps=4\)\]"):
        train(build_model(adam), ExactAccumulation())
