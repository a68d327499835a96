"""Embedding gradients are scattered into the sums, and come out as the dense gradient would."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

pytestmark = pytest.mark.filterwarnings("ignore:.*the gradients of all lookups of a row are summed:UserWarning")
ROWS, VOCABULARY, WIDTH = 12, 50, 4
generator = np.random.default_rng(0)
# Every row holds some words twice, and the rows share words.
WORDS, TARGETS = generator.integers(0, 9, (ROWS, 6)), generator.normal(size=(ROWS, 2)).astype("float32")


def model_of(optimizer, dense=False, **mode):
    keras.utils.set_random_seed(2)
    inputs = keras.Input((6,), dtype="int32")
    embedding = keras.layers.Embedding(VOCABULARY, WIDTH, name="embedding")
    if dense:
        hidden = keras.layers.Dense(WIDTH, use_bias=False, name="embedding")(keras.ops.one_hot(inputs, VOCABULARY))
    else:
        hidden = embedding(inputs)
    outputs = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, "mse", **mode)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "inner",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.05, clipnorm=0.1),
        # The sums are dense by the time that the inner optimizer gets them.
        *(
            pytest.param(make, marks=pytest.mark.long)
            for make in (
                lambda: keras.optimizers.Adagrad(0.05, global_clipnorm=0.1),
                lambda: keras.optimizers.RMSprop(0.05, clipvalue=0.01),
                lambda: keras.optimizers.Ftrl(0.05),
                lambda: keras.optimizers.Lamb(0.05),
            )
        ),
    ],
    ids=["SGD", "Adam", "Adagrad", "RMSprop", "Ftrl", "Lamb"],
)
def test_equals_the_dense_gradient_of_the_whole_batch(inner, jit_compile):
    # Keras's own sparse update is wrong where rows repeat, so that the reference multiplies by one-hot rows.
    whole = model_of(inner(), dense=True, run_eagerly=True)
    sparse = model_of(AccumulatingOptimizer(inner(), 4), jit_compile=jit_compile)
    whole.set_weights(sparse.get_weights())
    whole.fit(WORDS, TARGETS, ROWS, epochs=2, shuffle=False, verbose=0)
    sparse.fit(WORDS, TARGETS, 3, epochs=2, shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    assert largest_difference(sparse, whole) < 1e-6


@pytest.mark.long
@pytest.mark.own_process
def test_on_two_replicas(mirrored):
    whole = model_of(keras.optimizers.Adam(0.05), dense=True, run_eagerly=True)
    with mirrored.scope():
        sparse = model_of(AccumulatingOptimizer(keras.optimizers.Adam(0.05), 3))
    whole.set_weights(sparse.get_weights())
    whole.fit(WORDS, TARGETS, ROWS, epochs=2, shuffle=False, verbose=0)
    sparse.fit(WORDS, TARGETS, 4, epochs=2, shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    assert largest_difference(sparse, whole) < 1e-6


def test_a_micro_step_makes_nothing_as_large_as_the_table():
    model = model_of(AccumulatingOptimizer("adam", 4))
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)

    @tf.function
    def gather(words, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(words) - targets))
        with optimizer.accumulate_only():
            optimizer.apply(tape.gradient(loss, model.trainable_variables))

    graph = gather.get_concrete_function(tf.constant(WORDS, tf.int32), tf.constant(TARGETS)).graph
    made = [output for op in graph.get_operations() for output in op.outputs]
    # A read hands on the table itself, and copies nothing.
    assert {output.op.type for output in made if output.shape == (VOCABULARY, WIDTH)} <= {"ReadVariableOp"}
    assert "ResourceScatterAdd" in {op.type for op in graph.get_operations()}
