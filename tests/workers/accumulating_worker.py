"""One of two workers that accumulate gradients in a loop of their own."""

import keras
import numpy as np
import tensorflow as tf
from sample_models.cases import DataCase, build_model

from keras_paragrad import AccumulatingOptimizer


def trained_by_worker(_: None) -> list[np.ndarray]:
    """Trains with the other worker, and returns the weights; called in a process of its own."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
    )
    model = build_model(
        lambda: AccumulatingOptimizer(keras.optimizers.Adam(clipnorm=0.05), 3, weighting="uniform"), strategy=strategy
    )
    optimizer = model.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.MeanSquaredError(reduction="sum")

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / 4.0 + sum(model.losses) / 2
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    worker = strategy.cluster_resolver.task_id
    for x, y in DataCase((4,) * 7).batches():
        run(tf.constant(x[worker::2]), tf.constant(y[worker::2]))
    optimizer.flush()
    assert optimizer.iterations.numpy() == 3
    return model.get_weights()
