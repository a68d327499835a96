"""Each update against one that is taken by hand, an example at a time."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.private_updates import by_hand, cross_entropy, draws_of, flat, norm_of, perceptron, some_data

from keras_paragrad.privacy import make_private

UPDATES, SIZE = 6, 10
ARGUMENTS = {"expected_batch_size": SIZE, "delta": 1e-3, "seed": 3}


def adam():
    # The noise makes gradients large, so its division by their size amplifies no rounding.
    return keras.optimizers.Adam(0.05, clipnorm=0.5)


def by_layer(bounds):
    """Clips the gradients of each layer, a kernel and a bias, to a bound of its own."""

    def clip(gradients):
        parts = [gradients[:2], gradients[2:]]
        factors = [min(1.0, b / max(norm_of(part), 1e-12)) for part, b in zip(parts, bounds, strict=True)]
        clipped = [each * factor for part, factor in zip(parts, factors, strict=True) for each in part]
        return clipped, float(np.sqrt(np.sum(np.square(bounds))))

    return clip


# Without a graph, which takes longer to trace than the updates, where neither is what it is about.
MODES = {"eager": {"run_eagerly": True}, "graph": {"jit_compile": False}, "xla": {"jit_compile": True}}
CLIPS = {
    "flat": (0.3, flat(0.3)),
    "never": (1e3, flat(1e3)),
    "by name": ({"hidden": 0.2, ".*": 0.1}, by_layer([0.2, 0.1])),
    "per_layer": ("per_layer", by_layer([0.5**0.5, 0.5**0.5])),
}


@pytest.mark.covering
@pytest.mark.parametrize("physical", [None, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", [lambda: keras.optimizers.SGD(0.5), adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("clip", list(CLIPS))
def test_equals_updates_by_hand(clip, optimizer, weighted, reduction, mode, physical):
    x, y = some_data()
    weights = np.linspace(0, 2, len(x)).astype("float32") if weighted else None
    # A sum has no place for regularizers in batches that are cut.
    regularizer = "l2" if reduction != "sum" else None
    model, reference = perceptron(regularizer), perceptron(regularizer)
    clip_norm, clip_by_hand = CLIPS[clip]
    private = make_private(model, clip_norm=clip_norm, noise_multiplier=0.5, physical_batch_size=physical, **ARGUMENTS)
    # Without metrics, XLA compiles all physical batches in one call.
    metrics = ["accuracy"] if weighted else None
    private.compile(optimizer(), cross_entropy(reduction=reduction), metrics=metrics, **MODES[mode])
    history = private.fit(x, y, sample_weight=weights, epochs=1, verbose=0).history
    loss = cross_entropy(reduction="sum")
    losses, sizes = by_hand(reference, private, optimizer(), UPDATES, x, y, weights, clip=clip_by_hand, loss=loss)
    assert private.privacy.updates == UPDATES
    assert len(set(sizes)) > 1, "draws differ in size"
    largest = max(np.abs(each).max() for each in reference.get_weights())
    for found, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6 * largest, rtol=0)
    if reduction == "sum":
        losses = losses * sizes
    # As Keras does: batches count by their examples.
    np.testing.assert_allclose(history["loss"], [np.sum(losses * sizes) / np.sum(sizes)], rtol=1e-5)


def test_empty_draws_make_updates_of_noise():
    x, y = some_data(8)
    model, reference = perceptron(), perceptron()
    private = make_private(
        model, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, delta=1e-3, seed=1, physical_batch_size=4
    )
    private.compile(keras.optimizers.SGD(0.1), cross_entropy(), metrics=["accuracy"], jit_compile=False)
    history = private.fit(x, y, verbose=0).history
    losses, sizes = by_hand(
        reference, private, keras.optimizers.SGD(0.1), 8, x, y, clip=flat(1.0), loss=cross_entropy(reduction="sum")
    )
    assert 0 in sizes
    for found, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(history["loss"], [np.sum(losses * sizes) / np.sum(sizes)], rtol=1e-5)
    assert np.isfinite(history["accuracy"]).all()


def test_metrics_are_those_of_drawn_rows():
    """A metric without sample weights sees neither padding nor a row twice."""
    x, y = some_data()

    class Rows(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="rows")
            self.count = self.add_weight(name="count", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.count.assign_add(tf.cast(tf.shape(y_pred)[0], "float32"))

        def result(self):
            return self.count.value

    private = make_private(perceptron(), clip_norm=1.0, noise_multiplier=1.0, physical_batch_size=4, **ARGUMENTS)
    accuracy = keras.metrics.SparseCategoricalAccuracy("weighted")
    private.compile(
        keras.optimizers.SGD(0.0), cross_entropy(), metrics=["accuracy", Rows()], weighted_metrics=[accuracy]
    )
    history = private.fit(x, y, verbose=0).history
    numbers = np.concatenate(draws_of(private, UPDATES))
    predicted = private.predict(x[numbers], verbose=0).argmax(-1)
    assert history["rows"] == [len(numbers)]
    np.testing.assert_allclose(history["accuracy"], [np.mean(predicted == y[numbers])], rtol=1e-6)
    np.testing.assert_allclose(history["weighted"], history["accuracy"], rtol=1e-6)


@pytest.mark.long
def test_several_inputs_and_outputs():
    x, y = some_data()
    inputs = [keras.Input((FEATURES,)) for FEATURES in (5, 5)]
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()(inputs))
    outputs = {"a": keras.layers.Dense(3, name="a")(hidden), "b": keras.layers.Dense(1, name="b")(hidden)}
    model = keras.Model(inputs, outputs)
    before = model.get_weights()
    private = make_private(model, clip_norm=0.5, noise_multiplier=1e-6, physical_batch_size=8, **ARGUMENTS)
    losses = {"a": cross_entropy(), "b": "mse"}
    private.compile("sgd", losses, loss_weights={"a": 1.0, "b": 0.5}, run_eagerly=True)
    targets = {"a": y, "b": x[:, :1]}
    weights = {"a": np.ones(len(x)), "b": np.full(len(x), 0.5)}
    history = private.fit([x, x[::-1]], targets, sample_weight=weights, verbose=0).history
    assert all(np.any(one != other) for one, other in zip(before, model.get_weights(), strict=True))
    total = history["a_loss"][0] + 0.5 * history["b_loss"][0]
    np.testing.assert_allclose(history["loss"][0], total, rtol=0.05)


@pytest.mark.long
def test_low_rank_fine_tuning():
    """Only the factors are clipped, noised and trained."""
    x, y = some_data()
    models = perceptron(), perceptron()
    for model in models:
        keras.utils.set_random_seed(1)
        model.layers[0].enable_lora(2)
        model.layers[1].trainable = False
    model, reference = models
    before = model.get_weights()
    private = make_private(model, clip_norm=0.2, noise_multiplier=0.5, physical_batch_size=8, **ARGUMENTS)
    private.compile(keras.optimizers.SGD(0.5), cross_entropy(), run_eagerly=True)
    private.fit(x, y, verbose=0)
    loss = cross_entropy(reduction="sum")
    by_hand(reference, private, keras.optimizers.SGD(0.5), UPDATES, x, y, clip=flat(0.2), loss=loss)
    assert len(model.trainable_weights) == 3
    for found, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)
    assert sum(np.any(one != other) for one, other in zip(before, model.get_weights(), strict=True)) == 3


@pytest.mark.few(1)
@pytest.mark.parametrize("physical", [None, 8])
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[pytest.mark.long] * (mode == "graph")) for mode in MODES])
def test_embeddings(mode, physical):
    """Words that no example has get noise too; the gradient of a lookup is made of rows."""
    tokens = np.random.default_rng(0).integers(7, size=(60, 4))

    def build():
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(9, 3)
        return keras.Sequential([keras.Input((4,)), embedding, keras.layers.Flatten(), keras.layers.Dense(3)])

    model, reference = build(), build()
    private = make_private(model, clip_norm=0.2, noise_multiplier=0.5, physical_batch_size=physical, **ARGUMENTS)
    # As above.
    metrics = None if physical else ["accuracy"]
    private.compile(keras.optimizers.SGD(0.5), cross_entropy(), metrics=metrics, **MODES[mode])
    private.fit(tokens, tokens[:, 0] % 3, verbose=0)
    loss = cross_entropy(reduction="sum")
    labels = tokens[:, 0] % 3
    by_hand(reference, private, keras.optimizers.SGD(0.5), UPDATES, tokens, labels, clip=flat(0.2), loss=loss)
    for found, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


class Subclassed(keras.Model):
    """Has no weights before it is called."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.out = keras.layers.Dense(3)

    def call(self, inputs):
        return self.out(self.hidden(inputs["x"]))


@pytest.mark.long
def test_a_subclassed_model_with_inputs_by_name():
    x, y = some_data()
    keras.utils.set_random_seed(0)
    model, reference = Subclassed(), perceptron()
    private = make_private(model, clip_norm=0.2, noise_multiplier=0.5, physical_batch_size=8, **ARGUMENTS)
    private.compile(keras.optimizers.SGD(0.5), cross_entropy(), run_eagerly=True)
    private({"x": x[:1]})
    reference.set_weights(model.get_weights())
    private.fit({"x": x}, y, verbose=0)
    loss = cross_entropy(reduction="sum")
    by_hand(reference, private, keras.optimizers.SGD(0.5), UPDATES, x, y, clip=flat(0.2), loss=loss)
    for found, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.long
def test_a_model_that_is_not_built():
    x, y = some_data()
    private = make_private(Subclassed(), clip_norm=0.2, noise_multiplier=0.5, **ARGUMENTS)
    private.compile("sgd", cross_entropy(), jit_compile=False)
    private.fit({"x": x}, y, epochs=2, verbose=0)
    assert private.privacy.updates == 2 * UPDATES
