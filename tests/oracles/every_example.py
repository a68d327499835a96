"""One harness that holds all per-example quantities of a model to a loop over its examples."""

import keras
import numpy as np
import tensorflow as tf
from oracles.whole_batches import example_gradients, gradient_error, norms_of

from keras_paragrad.per_example.capture import Capture
from keras_paragrad.per_example.probing import units_for
from keras_paragrad.per_example.quantities import Quantities

TOLERANCE = 1e-6
# XLA rounds in its own way, and the loop is run without it.
TOLERANCE_OF_XLA = 2e-6


def quantities(model, x, targets, weights, jit_compile, training=None, beside_plain=False, run_eagerly=False):
    """What `computing` computes, for one batch."""
    return computing(model, weights, jit_compile, training, beside_plain, run_eagerly)(x, targets)


def computing(model, weights, jit_compile, training=None, beside_plain=False, run_eagerly=False):
    """A function from a batch and its targets to all that there is to be had of a backward pass.

    That is gradients, squared norms, second moments and weighted sums, and the plain gradient if it is to be computed
    in the same graph. Batches of one size share a graph, which takes longest to make.
    """
    plain_weights = [variable.value for variable in model.trainable_variables] if beside_plain else []

    def compute(x, targets):
        anchor = tf.zeros([])
        with tf.GradientTape() as tape:
            tape.watch(anchor)
            units = units_for(model, (x,), {"training": training})
            capture = Capture(model, units, anchor, not beside_plain)
            loss = tf.reduce_sum(tf.cast(capture(x, training=training), "float32") * targets)
        _, *plain = tape.gradient(loss, [anchor, *plain_weights], unconnected_gradients="zero")
        found = Quantities(capture.recorded, model.trainable_variables)
        # Rules may keep what they computed for the norms, as when a clipped update follows.
        squares = found.squared_norms()
        # Given norms, what was recorded is zeroed only where one is not finite.
        totals = found.weighted_sums(tf.constant(weights), tf.sqrt(squares))
        sums = [
            tf.zeros(variable.shape) if total is None else tf.convert_to_tensor(total)
            for variable, total in zip(model.trainable_variables, totals, strict=True)
        ]
        plain = [tf.convert_to_tensor(gradient) for gradient in plain]
        return found.gradients(), squares, found.second_moments(), sums, plain

    return compute if run_eagerly else tf.function(compute, jit_compile=jit_compile, autograph=False)


def check(
    model: keras.Model,
    x,
    jit_compile: bool = False,
    tolerance: float | None = None,
    beside_plain: bool = False,
    run_eagerly: bool | None = None,
) -> None:
    """Holds what a model gives for a batch to the loop.

    Args:
        model: The model.
        x: The batch.
        jit_compile: Whether to compile with XLA.
        tolerance: Of errors, as a share of the largest norm of an example's gradient.
        beside_plain: Whether to take the plain gradient in the same backward pass.
        run_eagerly: Whether to do without a graph. Unless said, only what XLA compiles and what is beside a plain
            gradient is traced, as tracing takes longer than one pass.
    """
    if run_eagerly is None:
        run_eagerly = not (jit_compile or beside_plain)
    tolerance = tolerance or (TOLERANCE_OF_XLA if jit_compile else TOLERANCE)
    rows = len(keras.tree.flatten(x)[0])
    generator = np.random.default_rng(2)
    outputs = model(keras.tree.map_structure(tf.constant, x))
    targets = generator.normal(size=outputs.shape).astype("float32")
    weights = generator.uniform(0, 2, rows).astype("float32")
    weights[0] = 0

    def loss(y_pred, targets):
        return tf.reduce_sum(tf.cast(y_pred, "float32") * targets)

    theirs = example_gradients(model, x, loss, targets)
    gradients, squared_norms, moments, sums, plain = quantities(
        model,
        keras.tree.map_structure(tf.constant, x),
        targets,
        weights,
        jit_compile,
        beside_plain=beside_plain,
        run_eagerly=run_eagerly,
    )
    norms = norms_of(theirs)
    scale = float(norms.max()) or 1.0
    assert gradient_error(gradients, theirs, scale) < tolerance
    assert np.abs(np.sqrt(squared_norms) - norms).max() / scale < tolerance
    assert gradient_error(moments, [np.square(g).sum(0) for g in theirs], scale**2 * rows) < tolerance
    assert gradient_error(sums, [np.tensordot(weights, g, 1) for g in theirs], scale * weights.sum() or 1) < tolerance
    if beside_plain:
        assert gradient_error(plain, [g.sum(0) for g in theirs], scale * rows) < tolerance
