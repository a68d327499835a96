"""The slow, obvious reference: a loop of its own, and norms by NumPy."""

import keras
import numpy as np
import tensorflow as tf

ROWS, WIDTH = 96, 6
GENERATOR = np.random.default_rng(0)
X = (GENERATOR.normal(size=(ROWS, WIDTH)) + 1).astype("float32")
Y = GENERATOR.normal(size=(ROWS, 1)).astype("float32")


def inner():
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(5, activation="tanh", name="first")
    return keras.Sequential([keras.Input((WIDTH,)), hidden, keras.layers.Dense(1, name="second")])


def clipped_by(gradients, clip):
    """Gradients as Keras documents its clipping."""
    (name, limit), *_ = clip.items()
    if name == "clipvalue":
        return [np.clip(gradient, -limit, limit) for gradient in gradients]
    norms = [np.linalg.norm(gradient) for gradient in gradients]
    if name == "global_clipnorm":
        norms = [np.linalg.norm(norms)] * len(norms)
    return [gradient * min(1.0, limit / norm) for gradient, norm in zip(gradients, norms, strict=True)]


def expected(make_optimizer, batch_size, epochs=1, clip=None, model=None):
    """By update: learning rate and, weight by weight, the norms before and after clipping, of weights and update."""
    model = model or inner()
    optimizer = make_optimizer(**(clip or {}))
    optimizer.build(model.trainable_variables)
    found = []
    starts = [start for _ in range(epochs) for start in range(0, ROWS, batch_size)]
    for start in starts:
        x, y = X[start : start + batch_size], Y[start : start + batch_size]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = [gradient.numpy() for gradient in tape.gradient(loss, model.trainable_variables)]
        rate, before = float(optimizer.learning_rate), [v.numpy() for v in model.trainable_variables]
        optimizer.apply([tf.constant(gradient) for gradient in gradients])
        change = [v.numpy() - value for v, value in zip(model.trainable_variables, before, strict=True)]
        clipped = clipped_by(gradients, clip) if clip else gradients
        found.append(
            (rate, *([np.linalg.norm(value) for value in part] for part in (gradients, clipped, before, change)))
        )
    return found


def assert_reports(reports, wanted, steps, rtol=2e-4):
    """Compares reports with what the loop found at these updates, counted from 1."""
    np.testing.assert_array_equal(reports.steps, steps)
    picked = [wanted[step - 1] for step in steps]
    np.testing.assert_allclose(reports.learning_rate, [each[0] for each in picked], rtol=1e-6)
    gradients, clipped, weights, change = (np.array([each[part] for each in picked]) for part in (1, 2, 3, 4))
    scale = gradients.max()
    np.testing.assert_allclose(reports.weights.gradient_norm, gradients, rtol=rtol, atol=1e-6 * scale)
    np.testing.assert_allclose(reports.weights.clipped_gradient_norm, clipped, rtol=rtol, atol=1e-6 * scale)
    np.testing.assert_allclose(reports.weights.weight_norm, weights, rtol=rtol, atol=1e-6)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(weights > 0, change / weights, np.nan)
    np.testing.assert_allclose(reports.weights.update_ratio, ratio, rtol=20 * rtol)
    np.testing.assert_array_equal(reports.weights.nonfinite, 0)
    np.testing.assert_allclose(reports.model.gradient_norm, np.linalg.norm(gradients, axis=1), rtol=rtol)
    by_layer = np.stack([np.linalg.norm(gradients[:, part], axis=1) for part in (slice(0, 2), slice(2, 4))], 1)
    np.testing.assert_allclose(reports.layers.gradient_norm, by_layer, rtol=rtol)
