"""Workers that do not wait for each other: every example counted once, and one update for each batch."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from oracles.histories import BATCHES, CASES, MicroBatches, assert_same, shown_by
from runner.covering import examples

from keras_paragrad.distribution.servers.preparation import ServerPreparation
from keras_paragrad.per_example.mixing_layers import find_mixing_layer

own_process = pytest.mark.own_process(seconds=280)

LABELS = 3


def rows_of(count, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 8)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0), random.uniform(0, 2, count).astype("float32")


def build(strategy=None, optimizer=None, layers=None, **options):
    with strategy.scope() if strategy else keras.name_scope("alone"):
        hidden = layers or [keras.layers.Dense(16, activation="relu")]
        model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(LABELS)])
        model.compile(
            optimizer or keras.optimizers.SGD(0.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")],
            jit_compile=False,
            **options,
        )
    return model


class Alone:
    """The same model on one device; traced once."""

    def __init__(self):
        self.twin = build(layers=[keras.layers.Dense(16, activation="relu")])

    def __call__(self, model):
        self.twin.set_weights(model.get_weights())
        return self.twin


@pytest.mark.long
@own_process
def test_metrics_are_those_of_every_example_once(strategy):
    # With a learning rate of 0 all workers see the same weights, so metrics while training are those of evaluation.
    model = build(strategy)
    ServerPreparation.of(model)
    updates, alone = 0, Alone()

    @examples(3)
    @given(
        rows=st.integers(1, 100),
        batch_size=st.integers(3, 40),
        shuffle=st.booleans(),
        weighted=st.booleans(),
        steps_per_execution=st.sampled_from([1, 3]),
    )
    def equal(rows, batch_size, shuffle, weighted, steps_per_execution):
        nonlocal updates
        model.steps_per_execution = steps_per_execution
        x, y, weights = rows_of(rows)
        weights = weights if weighted else None
        history = model.fit(
            x, y, batch_size, epochs=2, verbose=0, shuffle=shuffle, sample_weight=weights, validation_data=(x, y)
        ).history
        updates += 2 * -(-rows // batch_size)
        assert int(model.optimizer.iterations) == updates
        expected = alone(model).evaluate(x, y, batch_size, verbose=0, sample_weight=weights, return_dict=True)
        for name, value in expected.items():
            np.testing.assert_allclose(history[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        unweighted = alone(model).evaluate(x, y, batch_size, verbose=0, return_dict=True)
        for name, value in unweighted.items():
            np.testing.assert_allclose(history[f"val_{name}"], value, rtol=1e-5, atol=1e-6, err_msg=name)

    equal()


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.5),
    "Adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(2e-2, 50, 0.9), clipnorm=0.5),
    "AdamW with averages": lambda: keras.optimizers.AdamW(2e-2, use_ema=True, ema_momentum=0.5, global_clipnorm=0.5),
    "Lamb": lambda: keras.optimizers.Lamb(2e-2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(2e-2), initial_scale=8.0),
}


@own_process
@pytest.mark.parametrize(
    "names",
    [["loss scale"], pytest.param(["momentum", "Adam", "AdamW with averages", "Lamb"], marks=pytest.mark.long)],
    ids=", ".join,
)
def test_counts_are_exact_in_every_run_and_the_loss_falls(strategy, names):
    x, y, _ = rows_of(210)
    for name in names:
        with strategy.scope():
            optimizer = OPTIMIZERS[name]()
        model = build(strategy, optimizer)
        ServerPreparation.of(model)
        losses = []
        for run in range(1, 3):
            losses += model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
            assert int(model.optimizer.iterations) == run * 2 * 27, name
            assert float(model.metrics[0].count.numpy()) == 210, name
        assert losses[-1] < 0.6 * losses[0], name


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.metrics[0].update_state(loss, sample_weight=tf.shape(x)[0])
        return self.get_metrics_result()


LAYERS = {
    "normalized": lambda: [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)],
    "recurrent": lambda: [keras.layers.Reshape((4, 2)), keras.layers.LSTM(6)],
    "embedded": lambda: (
        [keras.layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0]), keras.layers.Embedding(4, 3)]
        + [keras.layers.Flatten()]
    ),
}


def check_layers(strategy, *names):
    x, y, _ = rows_of(100)
    for name in names:
        with strategy.scope():
            hidden = LAYERS[name]()
        model = build(strategy, "adam", hidden)
        ServerPreparation.of(model)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert int(model.optimizer.iterations) == 26, name
        assert float(model.metrics[0].count.numpy()) == 100, name


@pytest.mark.long
@own_process
def test_more_models(strategy):
    check_layers(strategy, "recurrent", "embedded")


@pytest.mark.long
@own_process
def test_other_models(strategy):
    check_layers(strategy, "normalized")
    x, y, _ = rows_of(100)
    with strategy.scope():
        # Without an Input: it is built from the first batch, on the servers.
        model = OwnStep([keras.layers.Dense(LABELS)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ServerPreparation.of(model)
    model.fit(x, y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 13
    assert float(model.metrics[0].count.numpy()) == 100
    assert all("/job:ps" in weight.value.device for weight in [*model.weights, *model.optimizer.variables])


@pytest.mark.long
@own_process
def test_data_of_every_kind(strategy):
    x, y, _ = rows_of(50)
    model = build(strategy, "adam")
    ServerPreparation.of(model)
    batches = [(x[start : start + 12], y[start : start + 12]) for start in range(0, 50, 12)]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    for count, data, options in [
        (50, dataset, {}),
        (50, (batch for batch in batches), {}),
        (36, dataset.repeat(), {"steps_per_epoch": 3}),
        (40, x, {"y": y, "batch_size": 12, "validation_split": 0.2, "class_weight": {0: 1.0, 1: 2.0, 2: 1.0}}),
    ]:
        before = int(model.optimizer.iterations)
        seen = []
        model.fit(data, verbose=0, callbacks=[Seen(seen)], **options)
        assert seen == [count]
        assert int(model.optimizer.iterations) == before + -(-count // 12)


class Seen(keras.callbacks.Callback):
    """Notes the examples that the loss is of, before validation counts others."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_test_begin(self, logs=None):
        self.on_epoch_end(0)

    def on_epoch_end(self, epoch, logs=None):
        if not self.seen:
            self.model.get_metrics_result()
            self.seen.append(int(self.model.metrics[0].count.numpy()))


@pytest.mark.long
@own_process
def test_evaluation_and_prediction_are_exact_and_in_order(strategy):
    model = build(strategy, "adam")
    prepared, alone = ServerPreparation.of(model), Alone()

    @examples(3)
    @given(rows=st.integers(1, 60), batch_size=st.integers(1, 30), steps_per_execution=st.sampled_from([1, 4]))
    def equal(rows, batch_size, steps_per_execution):
        model.steps_per_execution = steps_per_execution
        x, y, weights = rows_of(rows)
        twin = alone(model)
        np.testing.assert_allclose(
            model.evaluate(x, y, batch_size, verbose=0, sample_weight=weights),
            twin.evaluate(x, y, batch_size, verbose=0, sample_weight=weights),
            rtol=1e-5,
            atol=1e-6,
        )
        predicted = model.predict(x, batch_size, verbose=0)
        np.testing.assert_allclose(predicted, twin.predict(x, batch_size, verbose=0), rtol=1e-5, atol=1e-6)

    equal()
    x, y, _ = rows_of(20)
    one = model.train_on_batch(x, y, return_dict=True)
    assert int(model.optimizer.iterations) == 1 and one["loss"] > 0
    twin = alone(model)
    assert model.test_on_batch(x, y, return_dict=True)["loss"] == pytest.approx(twin.evaluate(x, y, verbose=0)[0])
    np.testing.assert_allclose(model.predict_on_batch(x), twin.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    prepared.undo()


@pytest.mark.long
@own_process
@pytest.mark.parametrize(
    "names",
    [["two outputs"], ["two not reduced", "two sums"]],
    ids=", ".join,
)
def test_losses_of_outputs_are_those_of_one_device(strategy, names):
    """Uneven batches. With a learning rate of 0, all workers see the same weights."""
    for name in names:
        case = CASES[name]
        with strategy.scope():
            model = case.model(keras.optimizers.SGD(0.0))
        ServerPreparation.of(model)
        found = shown_by(case, model, MicroBatches(case.columns, BATCHES))
        assert_same(found, case.expected(optimizer=keras.optimizers.SGD(0.0)))


@pytest.mark.long
@own_process
def test_undo(strategy):
    model = build(strategy, "adam")
    before = set(model.__dict__)
    prepared = ServerPreparation.of(model)
    x, y, _ = rows_of(30)
    model.fit(x, y, verbose=0)
    assert model.fit.__self__ is prepared
    prepared.undo()
    assert [name for name in set(model.__dict__) - before if callable(model.__dict__[name])] == []
    assert model.fit.__func__ is type(model).fit
    ServerPreparation.of(model)
    model.fit(x, y, verbose=0)
    assert int(model.optimizer.iterations) == 2


@own_process
def test_weights_are_not_fetched_for_a_trial(strategy, caplog):
    model = build(strategy, layers=[keras.layers.Dense(16, activation=lambda x: x - keras.ops.mean(x, 0))])
    with caplog.at_level("DEBUG", "keras_paragrad"):
        assert find_mixing_layer(model, tf.TensorSpec([None, 8])) is None
    assert "weights are not fetched from parameter servers" in caplog.text


@own_process
def test_a_generator_that_ran_dry_is_refused(strategy):
    model = build(strategy)
    ServerPreparation.of(model)
    x, y, _ = rows_of(8)
    seen = []
    log = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    with pytest.raises(ValueError, match="no batch left for this epoch"):
        model.fit((batch for batch in [(x, y)] * 2), epochs=2, shuffle=False, verbose=0, callbacks=[log])
    assert len(seen) == 1 and seen[0] > 0
    with pytest.raises(ValueError, match="no batch left for this epoch"):
        model.evaluate(tf.data.Dataset.from_tensors((x, y)).filter(lambda *_: False), verbose=0)
