"""Under a strategy: the weights of one device, one all-reduce an update."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference, train_on_whole_windows, windows
from sample_models.cases import DataCase, OptimizerCase, build_model

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch

TOLERANCE = 1e-6
own_process = pytest.mark.own_process(seconds=280)


class CountedReduction(tf.distribute.ReductionToOneDevice):
    """Counts, while the graph runs, how often gradients are reduced."""

    def __init__(self):
        super().__init__()
        self.count = None

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        if self.count is not None:
            self.count.assign_add(1)
        return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)


@own_process
def test_all_reduces_when_it_runs_equal_updates():
    reduction = CountedReduction()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction)
    inner = OptimizerCase("Adam", {"clipnorm": 0.05}, {}, decays=False)
    model = build_model(lambda: AccumulatingOptimizer(inner(), 3), strategy=strategy)
    reduction.count = tf.Variable(0)
    data = DataCase((4,) * 18)
    model.fit(data.dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    assert model.optimizer.iterations.numpy() == 6
    assert reduction.count.numpy() == 6


@pytest.mark.long
@own_process
def test_without_the_callback(mirrored):
    data = DataCase((4,) * 7)
    inner = OptimizerCase("SGD", {"clipvalue": 0.02}, {}, decays=True)
    optimizer = functools.partial(AccumulatingOptimizer, steps=3, weighting="uniform")
    # The loop of one's own below is without the callback, and in a graph.
    parallel = build_model(lambda: optimizer(inner()), strategy=mirrored, run_eagerly=True)
    parallel.fit(data.dataset(), epochs=2, shuffle=False, verbose=0)
    whole = build_model(inner)
    train_on_whole_windows(whole, windows(data.batches(), lambda _: 3, 2, "carry"))
    # Fourteen micro-batches fill four windows; the two that are left over are flushed when fit ends.
    assert parallel.optimizer.iterations.numpy() == 5
    whole.train_on_batch(*(np.concatenate(parts) for parts in zip(*data.batches()[-2:], strict=True)))
    assert largest_difference(parallel, whole) < TOLERANCE


# In `make test`, these replicas have weighted ones.
@pytest.mark.long
@own_process
def test_windows_in_which_all_micro_batches_count_the_same(mirrored):
    """Uneven ones too, whose parts on replicas are uneven, and one of which leaves a replica without rows."""
    data = DataCase((4, 7, 1, 5, 2), weighted=True)

    def trained(strategy=None, **mode):
        model = build_model(
            lambda: AccumulatingOptimizer(keras.optimizers.SGD(0.5), 3, weighting="uniform"),
            "sum_over_batch_size",
            strategy,
            **mode,
        )
        if strategy:
            DistributedFit(strategy=mirrored).prepare(model)
            microbatch(model, 3)
        model.fit(data.dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
        return model

    assert largest_difference(trained(mirrored), trained(run_eagerly=True)) < TOLERANCE


@pytest.mark.long
@own_process
def test_windows_of_a_loss_of_one_number_count_the_same_where_it_is_stated(mirrored):
    """Calls of layers can't be divided there, as a window's micro-batches don't come together."""
    x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
    trained = []
    for dist, wrap, rows in (
        (DistributedFit("none"), lambda optimizer: optimizer, 8),
        (DistributedFit(mirrored), lambda optimizer: AccumulatingOptimizer(optimizer, 2, weighting="uniform"), 4),
    ):
        keras.utils.set_random_seed(0)
        with dist.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile(wrap(keras.optimizers.SGD(0.1)), lambda y, z: keras.ops.mean(keras.ops.square(y - z)))
        callbacks = [ExactAccumulation()] if rows == 4 else []
        dist.fit(model, x, x[:, :1], batch_size=rows, shuffle=False, verbose=0, callbacks=callbacks)
        trained.append(model)
    assert largest_difference(*trained) < TOLERANCE


@pytest.mark.long
@own_process
def test_custom_training_loop(mirrored):
    data = DataCase((4,) * 6)
    with mirrored.scope():
        model = build_model(lambda: AccumulatingOptimizer("adam", 2, weighting="uniform"), strategy=mirrored)
        loss_of = keras.losses.MeanSquaredError(reduction="sum")
    optimizer = model.optimizer

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / 4.0 + sum(model.losses) / 2
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    run = tf.function(lambda batch: mirrored.run(step, args=(batch,)))
    for batch in mirrored.experimental_distribute_dataset(data.dataset()):
        run(batch)
    whole = build_model(lambda: keras.optimizers.Adam())
    train_on_whole_windows(whole, windows(data.batches(), lambda _: 2, 1))
    assert optimizer.iterations.numpy() == 3
    assert largest_difference(model, whole) < TOLERANCE


def test_an_optimizer_from_outside_the_scope_is_refused():
    optimizer = AccumulatingOptimizer("adam")
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = build_model(lambda: optimizer)
        with pytest.raises(ValueError, match=r"Create the optimizer within `with strategy.scope\(\):`"):
            optimizer.build(model.trainable_variables)
