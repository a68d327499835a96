"""Private models take targets and sample weights of several outputs in every nesting that Keras takes."""

import functools

import keras
import numpy as np
import pytest

from keras_paragrad.privacy import make_private

ROWS = 8
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
B, A = (np.random.default_rng(seed).normal(size=(ROWS, 1)).astype("float32") for seed in (1, 2))
W = np.linspace(0.5, 2, ROWS).astype("float32")
V = W[::-1].copy()


def trained(kind, loss, y, sample_weight=None, physical=None):
    """The kernels after an epoch, by name, of updates that draw all examples, with almost no noise."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    heads = {name: keras.layers.Dense(1, kernel_initializer="ones", name=name) for name in "ba"}
    outputs = {name: head(inputs) for name, head in heads.items()}
    model = keras.Model(inputs, outputs if kind == "dict" else list(outputs.values()))
    private = make_private(
        model,
        clip_norm=0.5,
        expected_batch_size=ROWS,
        delta=1e-2,
        noise_multiplier=1e-4,
        seed=0,
        physical_batch_size=physical,
    )
    private.compile("sgd", loss=loss, weighted_metrics=[[], ["mae"]] if kind == "list" else {"a": ["mae"]})
    history = private.fit(X, y, epochs=1, verbose=0, sample_weight=sample_weight)
    assert np.isfinite(history.history["loss"]).all()
    return {name: head.kernel.numpy() for name, head in heads.items()}


@functools.cache
def expected(weighted):
    weights = {"b": W, "a": V} if weighted else None
    return trained("dict", {"b": "mse", "a": "mae"}, {"b": B, "a": A}, weights)


def check(ours, theirs):
    for name, kernel in theirs.items():
        np.testing.assert_allclose(ours[name], kernel, atol=1e-5)


@pytest.mark.few(0, "dict-loss2-y2-None-4")
@pytest.mark.parametrize(
    ("kind", "loss", "y", "weight", "physical"),
    [
        ("list", {"b": "mse", "a": "mae"}, {"b": B, "a": A}, None, None),
        ("list", {"b": "mse", "a": "mae"}, {"b": B, "a": A}, {"b": W, "a": V}, None),
        ("dict", {"b": "mse", "a": "mae"}, [A, B], None, 4),
        ("list", ["mse", "mae"], {"a": A, "b": B}, None, 4),
        ("list", {"b": "mse", "a": "mae"}, (B, A), (W, V), None),
    ],
)
def test_targets_by_name_and_by_position_train_alike(kind, loss, y, weight, physical):
    check(trained(kind, loss, y, weight, physical), expected(weight is not None))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_an_output_without_a_loss():
    check(trained("list", [None, "mae"], [A]), trained("list", [None, "mae"], [B, A]))
