"""The layer and what `wrap` returns, saved and loaded, exported, and beside other things."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracles.saving import FORMATS, check_config, saved_and_loaded
from sample_models.drawn_layers import some_inputs

from keras_paragrad import PerExampleGradients, wrap


@keras.saving.register_keras_serializable(package="tests")
def halve(norms):
    return 0.5 + 0 * norms


def inner():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(2)])


def compiled(**options):
    model = wrap(inner(), **options)
    # Tracing takes longer than a few small steps.
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    return model


X, Y = some_inputs((10, 3)), np.ones((10, 2), "float32")


@pytest.mark.parametrize(
    "options", [{}, {"quantity": "second_moment", "clip_norm": 2.0}, {"transform": halve}, {"capacity": 7}]
)
def test_config(options):
    check_config(PerExampleGradients(layers.Dense(3), **options))


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMATS)
def test_training_goes_on_after_loading(form, tmp_path):
    options = {"quantity": "gradients", "clip_norm": 0.1}
    model = compiled(**options)
    model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    loaded = saved_and_loaded(model, lambda: compiled(**options), form, tmp_path)
    for each in (model, loaded):
        each.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(loaded.per_example.norms, model.per_example.norms)
    assert loaded.per_example.clip_norm == 0.1


def test_nothing_of_a_step_is_saved():
    model = compiled(quantity="gradients")
    model.run_eagerly = False
    model.fit(X, Y, verbose=0)
    assert len(model.weights) == 4
    assert len(model.trainable_variables) == 4


def test_a_layer_in_a_saved_model(tmp_path):
    model = keras.Sequential([keras.Input((3,)), PerExampleGradients(layers.Dense(4), clip_norm=1.0), layers.Dense(2)])
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    loaded = keras.models.load_model(*[(model.save(path := tmp_path / "model.keras"), path)[1]])
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    loaded.fit(X, Y, verbose=0)
    assert loaded.layers[0].count == 10


def test_export(tmp_path):
    model = compiled(clip_norm=1.0)
    model.fit(X, Y, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(loaded.serve(X), model.predict(X, verbose=0), rtol=1e-6)


def test_the_wrapped_model_has_learnt_what_the_wrapper_has():
    plain = inner()
    model = wrap(plain)
    model.compile("adam", "mse", run_eagerly=True)
    before = plain.predict(X, verbose=0)
    model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(plain.predict(X, verbose=0), model.predict(X, verbose=0))
    assert not np.array_equal(before, plain.predict(X, verbose=0))
    assert model.count_params() == plain.count_params()


def test_a_copy():
    model = compiled()
    model.fit(X, Y, verbose=0)
    copy = keras.models.clone_model(model)
    copy.compile("adam", "mse", run_eagerly=True)
    copy.fit(X, Y, batch_size=3, verbose=0)
    assert (copy.per_example.count, model.per_example.count) == (1, 10)
