"""A label for each row: each row's own class is differentiated, as if that row were alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import hessian_vector_product, input_gradients, input_jacobian, integrated_gradients

layers = keras.layers
ROWS, CLASSES = 7, 4
LABELS = np.array([3, 0, 1, 1, 2, 3, 0])
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(ROWS, 3)).astype("float32")


def build(*outputs):
    inputs = keras.Input((3,))
    hidden = layers.Dense(5, "tanh")(inputs)
    scores = [layers.Dense(units, "softmax" if units > 1 else None)(hidden) for units in outputs or (CLASSES,)]
    return keras.Model(inputs, scores[0] if len(scores) == 1 else scores)


def check(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def tape_of_each_row(model, x, labels):
    gradients = []
    for row, label in zip(x, labels, strict=True):
        watched = tf.constant(row[None])
        with tf.GradientTape() as tape:
            tape.watch(watched)
            score = model(watched, training=False)[0, ..., label]
        gradients.append(tape.gradient(score, watched).numpy())
    return np.concatenate(gradients)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_gradients_of_each_rows_own_class(jit_compile):
    model = build()
    expected = tape_of_each_row(model, X, LABELS)
    check(input_gradients(model, X, output=LABELS, batch_size=3, jit_compile=jit_compile), expected)


@pytest.mark.parametrize(
    "labels",
    [
        list(LABELS),
        tuple(LABELS.tolist()),
        tf.constant(LABELS),
        tf.Variable(LABELS),
        LABELS[:, None],
        LABELS.astype("uint8"),
        LABELS.astype("uint64"),
    ],
    ids=["list", "tuple", "tensor", "variable", "column", "uint8", "uint64"],
)
def test_every_kind_of_labels(labels):
    model = build()
    check(input_gradients(model, X, labels, batch_size=4), tape_of_each_row(model, X, LABELS))


def test_images():
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, activation="silu"), layers.Flatten(), layers.Dense(CLASSES)]
    )
    images = GENERATOR.normal(size=(ROWS, 8, 8, 3)).astype("float32")
    check(input_gradients(model, images, LABELS), tape_of_each_row(model, images, LABELS))


def test_integrated_gradients_add_up_to_the_difference_of_each_rows_own_score():
    model, rows = build(), np.arange(ROWS)
    found = integrated_gradients(model, X, output=LABELS, batch_size=4)
    scores, baseline = model.predict(X, verbose=0), model.predict(np.zeros_like(X), verbose=0)
    np.testing.assert_allclose(found.sum(axis=1), (scores - baseline)[rows, LABELS], atol=1e-6)
    every = np.stack([integrated_gradients(model, X, output=index) for index in range(CLASSES)])
    check(found, every[LABELS, rows])


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
def test_jacobians(mode):
    model = build()
    rows = np.arange(ROWS)
    expected = input_jacobian(model, X)[rows, LABELS]
    check(input_jacobian(model, X, mode, output=LABELS, batch_size=4), expected)


def test_jacobians_of_outputs_with_more_axes():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(8, "tanh"), layers.Reshape((2, 4))])
    expected = input_jacobian(model, X)[np.arange(ROWS), :, LABELS]
    check(input_jacobian(model, X, output=LABELS, batch_size=4), expected)


def test_hessian_vector_products():
    model, vector = build(), GENERATOR.normal(size=X.shape).astype("float32")
    every = np.stack([hessian_vector_product(model, X, vector, index) for index in range(CLASSES)])
    check(hessian_vector_product(model, X, vector, LABELS, batch_size=4), every[LABELS, np.arange(ROWS)])


def test_nested_inputs_and_streams():
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    scores = layers.Dense(CLASSES)(layers.Dense(5, "tanh")(layers.Concatenate()([left, right])))
    model = keras.Model({"left": left, "right": right}, scores)
    x = {"left": X, "right": X[::-1].copy()}
    expected = np.stack([input_gradients(model, x, index, wrt="right") for index in range(CLASSES)])
    found = np.concatenate(list(input_gradients(model, x, LABELS, wrt="right", stream=True, batch_size=3)))
    check(found, expected[LABELS, np.arange(ROWS)])


def test_replicas_take_the_labels_of_their_rows():
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = build()
    weights = model.get_weights()
    alone = build()
    alone.set_weights(weights)
    check(input_gradients(model, X, LABELS, batch_size=4), tape_of_each_row(alone, X, LABELS))


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (LABELS[:-1], r"\[7, 6\] rows, and must have the same number"),
        (LABELS + 1, r"label 4 for row 0, .*out of range.* shape \(7, 4\)"),
        (LABELS - 1, "`output` is -1, and must be labels that count from 0"),
        (LABELS + 2**40, "must be labels that count from 0"),
        (LABELS.astype("float32"), r"of dtype float32.*Write labels.astype\('int32'\)"),
        (LABELS > 1, "of dtype bool .*must have an integer for each row"),
        (LABELS.astype(str), "must have an integer for each row"),
        (np.eye(CLASSES, dtype="int32")[LABELS], r"shape \(7, 4\).*np.argmax\(labels, axis=-1\)"),
        (np.ones((ROWS, 1, 2), "int32"), r"of shape \(rows,\) or \(rows, 1\)"),
        ([[1], [2, 3]], "`output` is"),
        (np.zeros(0, "int32"), r"shape \(0,\)"),
    ],
)
def test_labels_that_are_refused(labels, says):
    with pytest.raises(ValueError, match=says):
        input_gradients(build(), X, labels)


def test_models_that_have_no_such_entries_are_refused():
    with pytest.raises(ValueError, match="one score per row: remove `output`"):
        input_gradients(build(1), X, LABELS)
    model = build(CLASSES, 2)
    with pytest.raises(ValueError, match="has 2 outputs") as caught:
        input_gradients(model, X, LABELS)
    # What the message says to write works.
    single = eval(str(caught.value).split("such as ")[1].split(", and")[0])
    check(input_gradients(single, X, LABELS), tape_of_each_row(single, X, LABELS))


class Batches(keras.utils.PyDataset):
    num_batches = 1

    def __getitem__(self, index):
        return X, LABELS


@pytest.mark.parametrize("derivative", [input_gradients, input_jacobian, integrated_gradients])
def test_labels_beside_batches_are_refused(derivative):
    dataset = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(4)
    for batches in (dataset, iter([(X, LABELS)]), Batches()):
        with pytest.raises(ValueError, match="whose rows may come in any order. Pass arrays for both"):
            derivative(build(), batches, output=LABELS)
    model = build()
    found = np.concatenate([input_gradients(model, x, output=y) for x, y in dataset])
    check(found, tape_of_each_row(model, X, LABELS))
