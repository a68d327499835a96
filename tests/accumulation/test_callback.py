"""`ExactAccumulation` says what it needs, leaves no trace, and compiles once."""

import keras
import numpy as np
import pytest
from oracles.whole_batches import largest_difference
from sample_models.cases import DataCase, build_model

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation


def fit(model, data=DataCase((4,) * 5), callbacks=(), **arguments):  # noqa: B008
    model.fit(data.dataset(), shuffle=False, verbose=0, callbacks=list(callbacks), **arguments)


@pytest.mark.filterwarnings("always")
def test_the_optimizer_alone_says_once_what_the_callback_would_add():
    model = build_model(lambda: AccumulatingOptimizer("sgd", 2))
    with pytest.warns(UserWarning) as said:
        fit(model)
        fit(model)
    assert [str(each.message).count("ExactAccumulation()") for each in said if "keras" in str(each.message)] == [1]


def test_a_window_of_one_micro_batch_is_exact_alone():
    fit(build_model(lambda: AccumulatingOptimizer("sgd", 1)))


@pytest.mark.few(1)
@pytest.mark.parametrize("weighting", ["uniform", "auto"])
def test_nothing_is_said_where_nothing_is_missing(caplog, weighting):
    model = build_model(lambda: AccumulatingOptimizer("sgd", 2, weighting=weighting))
    fit(model, callbacks=[ExactAccumulation()] if weighting == "auto" else [])
    # TensorFlow counts the functions of all optimizers as one, and may warn of retracing.
    assert not [record for record in caplog.records if record.name == "keras_paragrad"]


def test_the_model_is_as_it_was_afterwards():
    model = build_model(lambda: AccumulatingOptimizer("sgd", 2, weighting="uniform"))
    before = {name for name, value in vars(model).items() if callable(value)}
    loss = model._compile_loss
    fit(model, callbacks=[ExactAccumulation()])
    assert {name for name, value in vars(model).items() if callable(value)} == before
    assert model._compile_loss is loss
    assert "build" not in vars(loss)
    assert all(isinstance(flat.loss, keras.losses.Loss) for flat in loss._flat_losses)
    fit(model)
    assert model.optimizer.iterations.numpy() == 6


class CountsTraces(keras.layers.Layer):
    traces = 0

    def call(self, inputs):
        type(self).traces += 1
        return inputs


def test_another_fit_compiles_nothing_and_another_compile_does():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), CountsTraces(), keras.layers.Dense(2)])
    model.compile(AccumulatingOptimizer("sgd", 2), "mse")
    fit(model, callbacks=[ExactAccumulation()])
    traced = CountsTraces.traces
    fit(model, callbacks=[ExactAccumulation()])
    assert CountsTraces.traces == traced
    model.compile(AccumulatingOptimizer("sgd", 3), "mse")
    fit(model, callbacks=[ExactAccumulation()])
    assert CountsTraces.traces > traced
    assert model.optimizer.iterations.numpy() == 2


def test_a_fit_that_broke_off_leaves_nothing_behind():
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    def trained(break_off):
        model = build_model(lambda: AccumulatingOptimizer(keras.optimizers.SGD(0.1), 4, weighting="uniform"))
        if break_off:
            with pytest.raises(KeyboardInterrupt):
                fit(model, callbacks=[ExactAccumulation(), Break()])
            model.optimizer.discard()
        fit(model, DataCase((4,) * 4))
        return model

    assert largest_difference(trained(True), trained(False)) == 0.0


@pytest.mark.long
def test_batch_normalization_is_warned_of():
    def model_of(**arguments):
        layers = [keras.Input((5,)), keras.layers.BatchNormalization(name="norm", **arguments), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(AccumulatingOptimizer("sgd", 2), "mse")
        return model

    with pytest.warns(UserWarning, match="1 BatchNormalization layer normalizes with the statistics of each"):
        fit(model_of(), callbacks=[ExactAccumulation()])
    fit(model_of(trainable=False), callbacks=[ExactAccumulation()])


@pytest.mark.long
def test_dropout_and_metrics_run():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    model.compile(AccumulatingOptimizer("sgd", 2), "mse", metrics=["mae"], steps_per_execution=2)
    history = model.fit(
        DataCase((4,) * 5).dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()], epochs=2
    ).history
    assert set(history) == {"loss", "mae"}
    assert np.isfinite(history["mae"]).all()


def test_the_logs_are_keras_own():
    data = DataCase((3, 5, 2, 4), weighted=True)
    logs = []
    for callbacks in ([ExactAccumulation()], []):
        model = build_model(
            lambda: AccumulatingOptimizer(keras.optimizers.SGD(0.0), 2, weighting="uniform"),
            metrics=["mae"],
            weighted_metrics=["mse"],
            run_eagerly=not callbacks,
        )
        logs.append(model.fit(data.dataset(), shuffle=False, verbose=0, callbacks=callbacks).history)
    for name, values in logs[1].items():
        np.testing.assert_allclose(logs[0][name], values, rtol=1e-6)
