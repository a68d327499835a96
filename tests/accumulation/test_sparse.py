"""Gradients of embeddings are scattered into the sums."""

import keras
import pytest
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer

VOCABULARY, WIDTH = 50, 4


@pytest.mark.filterwarnings("ignore:.*the gradients of all lookups of a row are summed:UserWarning")
def test_a_micro_step_makes_nothing_as_large_as_the_table():
    embedding = keras.layers.Embedding(VOCABULARY, WIDTH)
    pooled = keras.layers.GlobalAveragePooling1D()
    model = keras.Sequential([keras.Input((6,), dtype="int32"), embedding, pooled, keras.layers.Dense(2)])
    optimizer = AccumulatingOptimizer("adam", 4)
    optimizer.build(model.trainable_variables)

    @tf.function
    def gather(words, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(words) - targets))
        with optimizer.accumulate_only():
            optimizer.apply(tape.gradient(loss, model.trainable_variables))

    graph = gather.get_concrete_function(tf.ones((12, 6), tf.int32), tf.ones((12, 2))).graph
    made = [output for op in graph.get_operations() for output in op.outputs]
    # A read hands on the table itself, and copies nothing.
    assert {output.op.type for output in made if output.shape == (VOCABULARY, WIDTH)} <= {"ReadVariableOp"}
    assert "ResourceScatterAdd" in {op.type for op in graph.get_operations()}
