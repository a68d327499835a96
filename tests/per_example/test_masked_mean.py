"""With `masked_mean="example"` an example's gradient is what plain Keras has for it in a batch of its own."""

import functools

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from keras import layers
from oracles.saving import check_config
from runner.covering import examples

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    PerExampleGradients,
    microbatch,
    per_example_norms,
    wrap,
)

ROWS, LENGTH, CLIP, IGNORED = 4, 4, 0.2, 2


def sequences():
    """Masks of padding, which leave nothing of a row of zeros."""
    words = keras.Input((None,), dtype="int32")
    return keras.Model(words, layers.Dense(3)(layers.Dense(4, "tanh")(layers.Embedding(6, 3, mask_zero=True)(words))))


def two_outputs():
    """Two outputs of one mask, and a third without any."""
    words = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Dense(4, "tanh")(layers.Embedding(6, 3, mask_zero=True)(words))
    table = layers.Dense(1)(layers.Flatten()(layers.Embedding(6, 3)(words)))
    return keras.Model(words, [layers.Dense(3)(hidden), layers.Dense(3)(hidden), table])


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(True, ignore_class=IGNORED, reduction="mean")


# The model, its losses, and what else compile takes.
KINDS = {
    "mask": (sequences, lambda: keras.losses.MeanSquaredError(), {}),
    "sum": (sequences, lambda: keras.losses.MeanSquaredError("sum"), {}),
    "mask and class": (sequences, crossentropy, {}),
    "outputs": (
        two_outputs,
        lambda: [keras.losses.MeanSquaredError(), crossentropy(), keras.losses.MeanSquaredError()],
        {"loss_weights": [1.0, 0.5, 2.0]},
    ),
}


def made(kind, execution, clip, **options):
    """A wrapped model whose one step moves its weights by the gradient of the batch."""
    keras.utils.set_random_seed(0)
    build, loss, more = KINDS[kind]
    wrapped = wrap(build(), clip_norm=clip, quantity="gradients", capacity=8, masked_mean="example", **options)
    wrapped.compile(keras.optimizers.SGD(1.0), loss(), **more, **execution)
    return wrapped


@functools.cache
def trained(kind, execution, clip):
    return made(kind, dict(execution), clip)


@functools.cache
def plain(kind):
    """The model alone, in plain Keras."""
    keras.utils.set_random_seed(0)
    build, loss, more = KINDS[kind]
    model = build()
    # Tracing takes longer than a few small passes.
    model.compile(keras.optimizers.SGD(1.0), loss(), **more, run_eagerly=True)
    return model, model.get_weights()


def targets(kind, words, generator):
    def values():
        return generator.normal(size=(*words.shape, 3)).astype("float32")

    def classes():
        return generator.integers(0, 3, words.shape)

    if kind == "outputs":
        return [values(), classes(), generator.normal(size=(len(words), 1)).astype("float32")]
    return classes() if kind == "mask and class" else values()


def rows_of(data, chosen):
    return keras.tree.map_structure(lambda each: each[chosen], data)


def alone(kind, words, y, weights=None):
    """Each example's gradient, from a run of plain Keras on it alone: for each weight `(examples, *shape)`."""
    model, before = plain(kind)
    found = []
    for row in range(len(words)):
        chosen = slice(row, row + 1)
        model.set_weights(before)
        model.train_on_batch(words[chosen], rows_of(y, chosen), None if weights is None else weights[chosen])
        found.append([was - now for was, now in zip(before, model.get_weights(), strict=True)])
    model.set_weights(before)
    return [np.stack(rows) for rows in zip(*found, strict=True)]


def norms_of(gradients):
    return np.sqrt(sum(np.sum(np.square(rows.reshape(len(rows), -1)), 1) for rows in gradients))


def expected_update(gradients, clip, summed=False):
    norms = norms_of(gradients)
    weights = np.ones_like(norms) if clip is None else np.minimum(1, clip / np.maximum(norms, 1e-30))
    return [np.tensordot(weights, rows, 1) / (1 if summed else len(rows)) for rows in gradients]


def assert_close(ours, theirs, scale):
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6 * scale)


PLAIN, COMPILED = (("jit_compile", False),), (("jit_compile", True),)
WORDS = st.lists(st.lists(st.integers(0, 5), min_size=LENGTH, max_size=LENGTH), min_size=ROWS, max_size=ROWS).map(
    lambda rows: np.array(rows, "int32")
)


@pytest.mark.few(0, "mask-execution0-None")
@pytest.mark.parametrize(
    ("kind", "execution", "clip"),
    [
        ("mask", PLAIN, None),
        ("mask", COMPILED, CLIP),
        ("sum", PLAIN, CLIP),
        ("mask and class", PLAIN, CLIP),
        ("outputs", PLAIN, CLIP),
    ],
)
@examples(3)
@hypothesis.given(words=WORDS, weighted=st.booleans(), seed=st.integers(0, 99))
def test_each_example_is_as_alone(kind, execution, clip, words, weighted, seed):
    generator = np.random.default_rng(seed)
    y = targets(kind, words, generator)
    weights = None
    if weighted and kind != "outputs":
        weights = generator.uniform(0, 2, words.shape).astype("float32")
    wrapped, (reference, before) = trained(kind, execution, clip), plain(kind)
    wrapped.set_weights(before)
    # The loss that is shown is Keras's own.
    shown = reference.test_on_batch(words, y, weights, return_dict=True)["loss"]
    found = wrapped.train_on_batch(words, y, weights, return_dict=True)["loss"]
    assert found == pytest.approx(shown, rel=1e-6, abs=1e-6)

    gradients = alone(kind, words, y, weights)
    norms = norms_of(gradients)
    # A plain run's gradient is the difference of weights near 1, and has their rounding.
    scale = max(1.0, norms.max())
    layer = wrapped.per_example
    if clip is not None:
        np.testing.assert_allclose(layer.norms, norms, rtol=0, atol=1e-6 * scale)
    assert_close(layer.gradients, gradients, scale)
    update = [was - now for was, now in zip(before, wrapped.get_weights(), strict=True)]
    assert_close(update, expected_update(gradients, clip, kind == "sum"), scale * (len(words) if kind == "sum" else 1))


def test_rows_without_any_position_have_no_gradient():
    words = np.array([[1, 2, 0, 0], [0, 0, 0, 0]], "int32")
    wrapped = made("mask", {"run_eagerly": True}, CLIP)
    y = targets("mask", words, np.random.default_rng(0))
    wrapped.train_on_batch(words, y)
    assert wrapped.per_example.norms[1] == 0 < wrapped.per_example.norms[0]
    # The same as the functions have.
    expected = per_example_norms(plain("mask")[0], words, y, "mse")
    np.testing.assert_allclose(wrapped.per_example.norms, expected, rtol=1e-6)


# Uneven parts with uneven masks: the last micro-batch is smaller, and shorter, as where each is padded by itself.
PARTS = [
    np.array([[1, 2, 3, 4], [2, 0, 0, 0]], "int32"),
    np.array([[5, 5, 1, 0], [0, 0, 0, 0]], "int32"),
    np.array([[3, 4]], "int32"),
]
EVEN = np.concatenate([PARTS[0], PARTS[1], np.pad(PARTS[2], [(0, 0), (0, 2)])])


def update_of(wrapped, fit):
    before = plain("mask")[1]
    wrapped.set_weights(before)
    fit()
    return [was - now for was, now in zip(before, wrapped.get_weights(), strict=True)]


def of_parts(words):
    generator = np.random.default_rng(0)
    return [targets("mask", part, generator) for part in words]


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("weighting", ["auto", "examples"])
def test_windows_of_uneven_micro_batches(clip, weighting):
    y = of_parts(PARTS)
    rows = [alone("mask", *pair) for pair in zip(PARTS, y, strict=True)]
    gradients = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
    wrapped = made("mask", {"jit_compile": False}, clip)
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 3, weighting=weighting)
    wrapped.compile(optimizer, "mse", jit_compile=False, run_eagerly=clip is None)
    data = tf.data.Dataset.from_generator(
        lambda: zip(PARTS, y, strict=True),
        output_signature=(tf.TensorSpec((None, None), "int32"), tf.TensorSpec((None, None, 3), "float32")),
    )
    exact, history = ExactAccumulation(), []
    update = update_of(
        wrapped,
        lambda: history.append(
            wrapped.fit(data, steps_per_epoch=3, shuffle=False, verbose=0, callbacks=[exact]).history
        ),
    )
    assert_close(update, expected_update(gradients, clip), max(1, norms_of(gradients).max()))
    padded = np.concatenate([*y[:2], np.pad(y[2], [(0, 0), (0, 2), (0, 0)])])
    assert history[0]["loss"][0] == pytest.approx(plain("mask")[0].test_on_batch(EVEN, padded), rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_slices(jit_compile):
    (y,) = of_parts([EVEN])
    gradients = alone("mask", EVEN, y)
    wrapped = made("mask", {"jit_compile": jit_compile}, CLIP)
    shown = plain("mask")[0].test_on_batch(EVEN, y)
    microbatch(wrapped, 2)
    history = []
    update = update_of(
        wrapped, lambda: history.append(wrapped.fit(EVEN, y, batch_size=8, shuffle=False, verbose=0).history)
    )
    assert_close(update, expected_update(gradients, CLIP), max(1, norms_of(gradients).max()))
    # One device shows the masked mean of the whole batch.
    assert history[0]["loss"][0] == pytest.approx(shown, rel=1e-6)


@pytest.mark.long
@pytest.mark.own_process(seconds=200)
@pytest.mark.parametrize("clip", [CLIP, None])
def test_replicas(mirrored, clip):
    (y,) = of_parts([EVEN])
    gradients = alone("mask", EVEN, y)
    norms = norms_of(gradients)
    shown = plain("mask")[0].test_on_batch(EVEN, y)
    with mirrored.scope():
        # Their graphs are those of other tests of replicas.
        wrapped = made("mask", {"run_eagerly": True}, clip)
    DistributedFit(strategy=mirrored).prepare(wrapped)
    before = plain("mask")[1]
    wrapped.set_weights(before)
    history = wrapped.fit(EVEN, y, batch_size=8, shuffle=False, verbose=0).history
    update = [was - now for was, now in zip(before, wrapped.get_weights(), strict=True)]
    assert_close(update, expected_update(gradients, clip), max(1, norms.max()))
    assert history["loss"][0] == pytest.approx(shown, rel=1e-6)
    found = norms_of(wrapped.per_example.gradients)
    np.testing.assert_allclose(np.sort(found), np.sort(norms), rtol=0, atol=1e-6 * max(1, norms.max()))


def test_half_precision():
    (y,) = of_parts([EVEN])
    model = sequences()
    for layer in model.layers:
        layer.dtype_policy = "mixed_float16"
    wrapped = wrap(model, clip_norm=CLIP, masked_mean="example")
    wrapped.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
    wrapped.set_weights(plain("mask")[1])
    wrapped.train_on_batch(EVEN, y)
    # Activations in 11 bits.
    expected = norms_of(alone("mask", EVEN, y))
    np.testing.assert_allclose(wrapped.per_example.norms, expected, rtol=0, atol=2e-2 * expected.max())


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y - y_pred))


def test_what_can_not_be_had_is_refused():
    words = keras.Input((LENGTH,), dtype="int32")
    (y,) = of_parts([EVEN])

    def fitted(model, loss="mse", optimizer="sgd", callbacks=(), **options):
        wrapped = wrap(model, masked_mean="example", **options)
        wrapped.compile(optimizer, loss, jit_compile=False)
        wrapped.fit(EVEN, y, batch_size=2, verbose=0, callbacks=list(callbacks))

    own = OwnLoss(words, layers.Dense(3)(layers.Embedding(6, 3, mask_zero=True)(words)))
    with pytest.raises(ValueError, match="masked_mean='example'.*compute_loss"):
        fitted(own, loss_reduction="sum_over_batch_size")
    with pytest.raises(ValueError, match="Write reduction='sum_over_batch_size'"):
        fitted(sequences(), keras.losses.MeanSquaredError("mean_with_sample_weight"))
    optimizer = AccumulatingOptimizer("sgd", 2, weighting="mask")
    with pytest.raises(ValueError, match="weighting='examples'"):
        fitted(sequences(), optimizer=optimizer, callbacks=[ExactAccumulation()])
    with pytest.raises(ValueError, match="`masked_mean`"):
        PerExampleGradients(layers.Dense(3), masked_mean="rows")

    embedded = PerExampleGradients(layers.Embedding(6, 3, mask_zero=True), masked_mean="example")(words)
    mixed = keras.Model(words, PerExampleGradients(layers.Dense(3))(embedded))
    mixed.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match="for all of them"):
        mixed.fit(EVEN, y, verbose=0)

    wrapped = wrap(sequences(), masked_mean="example")
    with pytest.raises(ValueError, match="a custom training loop"), tf.GradientTape() as tape:
        loss = tf.reduce_mean(wrapped(EVEN, training=True))
        tape.gradient(loss, wrapped.trainable_variables)


def test_clipping_does_not_warn(recwarn):
    wrapped = made("mask", {"run_eagerly": True}, CLIP)
    wrapped.fit(EVEN, of_parts([EVEN])[0], verbose=0)
    assert not [warning for warning in recwarn if "masks" in str(warning.message)]


def test_it_is_saved(tmp_path):
    check_config(PerExampleGradients(layers.Dense(3), masked_mean="example"))
    config = PerExampleGradients(layers.Dense(3)).get_config()
    del config["masked_mean"]
    assert PerExampleGradients.from_config(config).masked_mean == "batch"
    wrapped = made("mask", {"run_eagerly": True}, CLIP)
    (y,) = of_parts([EVEN])
    wrapped.fit(EVEN, y, verbose=0)
    wrapped.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.per_example.masked_mean == "example"
    for each in (wrapped, loaded):
        each.fit(EVEN, y, verbose=0, shuffle=False)
    assert_close(loaded.get_weights(), wrapped.get_weights(), 1)
