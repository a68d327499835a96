"""What weights have released goes with them, is never counted down, and no key gives noise to two updates."""

import copy
import logging
import math
import weakref

import dp_accounting as dp
import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.private_updates import cross_entropy, perceptron, some_data

from keras_paragrad.distribution import Backup
from keras_paragrad.privacy import make_private, releases
from keras_paragrad.privacy.accounting import Updates, composed_epsilon
from keras_paragrad.privacy.ledger import ROWS, Entry, Event, Ledger, entries_of, table_of

SIZE, DELTA, EXAMPLES = 15, 1e-3, 30
RATE = SIZE / EXAMPLES


class Nothing(keras.losses.Loss):
    """A loss without a gradient: an update is noise alone."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(y_pred, -1) * 0.0


def build(noise=0.5, model=None, loss=None, optimizer=None, **options):
    budget = {} if "target_epsilon" in options else {"noise_multiplier": noise}
    arguments = {"clip_norm": 1.0, "expected_batch_size": SIZE, "delta": DELTA, **budget, **options}
    private = make_private(model or perceptron(), **arguments)
    compile_again(private, loss, optimizer)
    return private


def compile_again(private, loss=None, optimizer=None):
    private.compile(optimizer or keras.optimizers.SGD(1.0), loss or cross_entropy(), run_eagerly=True)


def fit(private, epochs=1, examples=EXAMPLES, seed=0, **options):
    return private.fit(*some_data(examples, seed), epochs=epochs, verbose=0, **options)


def spent(private, *parts):
    """Whether a model says what updates `(noise, rate, count)` cost, and how many they are."""
    truncation = private.privacy.truncation
    expected = composed_epsilon([Updates(*part, truncation) for part in parts], DELTA)
    assert private.privacy.updates == sum(count for *_, count in parts)
    # Of updates that the user states, no draw is known to be cut off.
    assert private.privacy.epsilon == pytest.approx(expected, rel=1e-5)


def moved(private, **options):
    """How an epoch moves the weights, which with the loss `Nothing` is its noise."""
    layer = private.per_example.layer
    before = np.concatenate([each.ravel() for each in layer.get_weights()])
    fit(private, **options)
    return np.concatenate([each.ravel() for each in layer.get_weights()]) - before


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise InterruptedError


class Restore(keras.callbacks.Callback):
    """Sets weights when an epoch begins."""

    def __init__(self, weights, epoch):
        super().__init__()
        self.weights, self.epoch = weights, epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            self.model.set_weights(self.weights)


@pytest.fixture(scope="module")
def first():
    """A model that has made four updates, and isn't to be changed."""
    private = build(0.5)
    fit(private, 2)
    return private


def copied(way, first, second, folder):
    """A model with the weights of the first one, that has more noise."""
    if way == "set_weights":
        second.set_weights(first.get_weights())
    elif way == "weights.h5":
        first.save_weights(folder / "w.weights.h5")
        second.load_weights(folder / "w.weights.h5")
    elif way == "checkpoint":
        path = tf.train.Checkpoint(model=first).write(str(folder / "checkpoint"))
        tf.train.Checkpoint(model=second).read(path)
    elif way == "inner model":
        second.per_example.layer.set_weights(first.per_example.layer.get_weights())
    elif way == "one layer":
        second.per_example.layer.layers[0].set_weights(first.per_example.layer.layers[0].get_weights())
    elif way == "same model":
        second = build(4.0, first.per_example.layer, examples=EXAMPLES)
    return second


@pytest.mark.parametrize("way", ["set_weights", "weights.h5", "checkpoint", "inner model", "one layer", "same model"])
def test_loaded_weights_bring_what_they_have_released(first, tmp_path, way):
    # A file counts for all values in it, so these are of this test alone.
    second = copied(way, first, build(4.0, perceptron(seed=8), examples=EXAMPLES), tmp_path)
    spent(second, (0.5, RATE, 4))
    assert "Each of 4 updates draws each example with probability 0.5, and adds noise" in second.privacy.statement()
    if way == "one layer":
        second.save(tmp_path / "model.keras")
        spent(keras.models.load_model(tmp_path / "model.keras"), (0.5, RATE, 4))
        fit(second)
        spent(second, (0.5, RATE, 4), (4.0, RATE, 2))
        assert "Each of 2 updates draws each of 30 examples with probability 0.5, and" in second.privacy.statement()
    spent(first, (0.5, RATE, 4))


def on_top_of(base, trainable=False, **options):
    """A private model with a new output layer on a layer or model."""
    base.trainable = trainable
    model = keras.Sequential([keras.Input((5,)), base, keras.layers.Dense(3)])
    return build(4.0, model, examples=EXAMPLES, **options)


def frozen(way, first, folder):
    """A layer or model with the weights of the first private model."""
    inner = first.per_example.layer
    if way == "keras":
        inner.save(folder / "inner.keras")
        return keras.models.load_model(folder / "inner.keras")
    clone = keras.models.clone_model(inner)
    clone.set_weights(inner.get_weights())
    if way == "lora":
        clone.layers[0].enable_lora(2)
    return clone.layers[0] if way == "one layer" else clone


@pytest.mark.parametrize("way", ["model", "one layer", "keras", "lora"])
def test_frozen_weights_bring_what_they_have_released(first, tmp_path, way):
    second = on_top_of(frozen(way, first, tmp_path))
    spent(second, (0.5, RATE, 4))
    fit(second)
    spent(second, (0.5, RATE, 4), (4.0, RATE, 2))
    spent(first, (0.5, RATE, 4))


@pytest.mark.parametrize("way", ["keras", "weights.h5", "checkpoint"])
@pytest.mark.parametrize("values", [False, True], ids=["layer", "values"])
def test_layers_of_loaded_models_in_another_process(first, tmp_path, monkeypatch, way, values):
    """Files bring a ledger for the whole model, and the loaded model may be gone when a layer of it is used."""
    first.save(tmp_path / "model.keras")
    # As if the process had trained nothing.
    monkeypatch.setattr(releases, "RELEASED", {b"": Ledger()})
    monkeypatch.setattr(releases, "LEDGERS", weakref.WeakKeyDictionary())
    loaded = keras.models.load_model(tmp_path / "model.keras") if way == "keras" else None
    layer = (loaded or copied(way, first, build(), tmp_path)).per_example.layer.layers[0]
    if values:
        copy = keras.models.clone_model(first.per_example.layer).layers[0]
        copy.set_weights(layer.get_weights())
        layer = copy
    spent(on_top_of(layer), (0.5, RATE, 4))
    assert build(examples=EXAMPLES, model=perceptron(seed=5)).privacy.epsilon == 0


@pytest.mark.long
def test_a_frozen_layer_of_several_private_models():
    first = build(0.5)
    fit(first)
    base = first.per_example.layer.layers[0]
    second = on_top_of(base)
    fit(second)
    spent(second, (0.5, RATE, 2), (4.0, RATE, 2))
    spent(first, (0.5, RATE, 2))
    base.trainable = True
    compile_again(second)
    fit(second)
    for private in (first, second):
        spent(private, (0.5, RATE, 2), (4.0, RATE, 4))
    with pytest.raises(ValueError, match="The budget is spent: 6 updates were made, for which epsilon is"):
        fit(on_top_of(base, noise_multiplier=None, target_epsilon=3.0, epochs=1))


@pytest.mark.few(0, "fit")
@pytest.mark.parametrize("change", ["fit", "quantize", "adapt"])
def test_private_weights_that_are_changed_in_between_are_unknown(caplog, change):
    """Where the change has no private example, the user says so."""
    first = build(model=perceptron())
    inner = first.per_example.layer
    fit(first)
    if change == "fit":
        public = keras.Sequential([keras.Input((5,)), *inner.layers])
        public.compile("sgd", cross_entropy(), run_eagerly=True)
        public.fit(*some_data(seed=1), verbose=0)
    elif change == "quantize":
        inner.layers[0].quantize("int8")
    else:
        inner.layers[0].bias.assign(keras.ops.std(some_data()[0]) * inner.layers[0].bias)
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        second = on_top_of(inner.layers[0])
        assert math.isinf(second.privacy.epsilon)
    assert "/hidden/" in caplog.text
    assert "which were changed outside of fit, were trained isn't known, so epsilon is infinite" in caplog.text
    second.privacy.replace_unknown()
    spent(second, (0.5, RATE, 2))
    fit(second)
    spent(second, (0.5, RATE, 2), (4.0, RATE, 2))


def test_public_weights_stay_public(tmp_path):
    """A frozen layer that private training only reads has released nothing, whatever is done with it."""
    base = perceptron().layers[0]
    first = on_top_of(base)
    best = keras.callbacks.EarlyStopping("epsilon", mode="min", patience=1, restore_best_weights=True)
    fit(first, 2, callbacks=[best])
    first.save_weights(tmp_path / "w.weights.h5")
    first.load_weights(tmp_path / "w.weights.h5")
    spent(first, (4.0, RATE, 4))
    copy = perceptron(seed=3).layers[0]
    copy.set_weights(base.get_weights())
    second = on_top_of(base)
    assert second.privacy.epsilon == on_top_of(copy).privacy.epsilon == 0
    second.predict(some_data()[0], verbose=0)
    fit(second)
    spent(second, (4.0, RATE, 2))
    base.set_weights([each + 0.125 for each in base.get_weights()])
    assert on_top_of(base).privacy.epsilon == 0
    assert math.isinf(first.privacy.epsilon)


def test_copies_of_a_model_bring_their_ledger(first, tmp_path):
    first.save(tmp_path / "model.keras")
    clone = keras.models.clone_model(first)
    clone.build((None, 5))
    clone.set_weights(first.get_weights())
    for other in (keras.models.load_model(tmp_path / "model.keras"), clone, copy.deepcopy(first)):
        spent(other, (0.5, RATE, 4))
    compile_again(other)
    fit(other)
    spent(other, (0.5, RATE, 6))
    spent(first, (0.5, RATE, 4))
    # Both have gone on, and each adds what is its own.
    clone.set_weights(other.get_weights())
    spent(clone, (0.5, RATE, 6))


@pytest.mark.few(1)
@pytest.mark.parametrize("ours", [True, False], ids=["Backup", "BackupAndRestore"])
def test_a_resumed_run_with_other_settings(tmp_path, ours):
    def backup():
        return Backup(tmp_path, on_sigterm=False) if ours else keras.callbacks.BackupAndRestore(tmp_path / "backup")

    with pytest.raises(InterruptedError):
        fit(build(0.5), 3, callbacks=[backup(), Stop()])
    second = build(4.0)
    fit(second, 3, callbacks=[backup()])
    spent(second, (0.5, RATE, 4), (4.0, RATE, 2))


@pytest.mark.long
def test_another_rate_is_accounted_for(first):
    for options, examples, rate in (({}, 60, SIZE / 60), ({"expected_batch_size": 10}, EXAMPLES, 10 / EXAMPLES)):
        second = build(0.5, **options)
        second.set_weights(first.get_weights())
        fit(second, examples=examples)
        parts = [(0.5, RATE, 4), (0.5, rate, second.privacy.updates - 4)]
        expected = composed_epsilon([Updates(*part) for part in parts], DELTA)
        assert second.privacy.epsilon == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_the_best_weights_have_the_cost_of_all(tmp_path):
    # It rises, so the first weights are the best.
    stops = keras.callbacks.EarlyStopping("epsilon", mode="min", patience=2, restore_best_weights=True)
    private = build(0.5)
    ends = []
    first = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(private.get_weights()[-1]))
    fit(private, 8, callbacks=[first, stops])
    np.testing.assert_array_equal(private.get_weights()[-1], ends[0])
    made = 2 * len(ends)
    assert made == 6
    spent(private, (0.5, RATE, made))
    private.save_weights(tmp_path / "best.weights.h5")
    second = build(0.5)
    second.load_weights(tmp_path / "best.weights.h5")
    assert second.privacy.updates == made


def test_earlier_weights_do_not_give_the_budget_back():
    private = build(target_epsilon=3.0, epochs=3)
    fit(private)
    earlier = private.get_weights()
    fit(private)
    for _ in range(2):
        private.set_weights(earlier)
        assert private.privacy.updates == 4
        assert private.privacy.updates_left == 2
    fit(private, 3, callbacks=[Restore(earlier, 0)])
    assert private.privacy.updates == 6
    assert private.privacy.epsilon <= 3.0
    private.set_weights(earlier)
    with pytest.raises(ValueError, match="The budget is spent: 6 updates were made"):
        fit(private)


def test_what_loaded_weights_have_released_is_of_the_budget(first):
    most = build(3.0)
    fit(most)
    private = build(target_epsilon=3.0, epochs=4)
    private.set_weights(first.get_weights())
    with pytest.raises(ValueError, match="spent: 4 updates were made, for which epsilon is 15.82, and.*is 3. To"):
        fit(private)
    private = build(target_epsilon=3.0, epochs=4, examples=EXAMPLES)
    private.set_weights(most.get_weights())
    assert 0 < (left := private.privacy.updates_left) < 8
    fit(private, 5)
    assert private.privacy.updates == 2 + left
    assert private.privacy.epsilon <= 3.0 < private.privacy.epsilon_of(private.privacy.entries(), 1)
    with pytest.raises(ValueError, match="The budget is spent|leaves . updates of the budget, less than an epoch"):
        fit(build(target_epsilon=3.0, epochs=4), 3, callbacks=[Restore(private.get_weights(), 1)])


def test_a_key_gives_noise_to_one_update_alone():
    private = build(loss=Nothing(), seed=3)
    begun = private.get_weights()
    draws = [moved(private)]
    later = private.get_weights()
    for weights in (begun, later, begun):
        private.set_weights(weights)
        draws.append(moved(private))
    compile_again(private, Nothing())
    private.set_weights(begun)
    draws.append(moved(private))
    draws.append(moved(private, callbacks=[Restore(begun, 0)]))
    # Within an epoch.
    steps = []
    rewind = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (steps.append(private.get_weights()[-1]), private.set_weights(begun))
    )
    fit(private, callbacks=[rewind])
    draws += [np.resize(step - begun[-1], len(draws[0])) for step in steps]
    for place, one in enumerate(draws):
        for other in draws[:place]:
            assert np.mean(one == other) < 0.2
    spent(private, (0.5, RATE, 14))


def test_another_training_has_another_key():
    """Of one seed, and with the same weights to begin with."""
    seed = 3
    first = moved(build(loss=Nothing(), seed=seed))
    np.testing.assert_array_equal(first, moved(build(loss=Nothing(), seed=seed)))
    others = {
        "noise": lambda: build(0.25, loss=Nothing(), seed=seed),
        "optimizer": lambda: build(loss=Nothing(), seed=seed, optimizer=keras.optimizers.SGD(1.0, nesterov=True)),
        "learning rate": lambda: build(loss=Nothing(), seed=seed, optimizer=keras.optimizers.SGD(2.0)),
        "loss": lambda: build(loss=Nothing(reduction="sum"), seed=seed),
        "weights": lambda: build(loss=Nothing(), seed=seed, model=perceptron(seed=1)),
        "clip norm": lambda: build(loss=Nothing(), seed=seed, clip_norm=2.0),
        "clips of layers": lambda: build(loss=Nothing(), seed=seed, clip_norm={"hidden": 0.8, ".*": 0.6}),
    }
    draws = {name: moved(make()) for name, make in others.items()}
    draws["data"] = moved(build(loss=Nothing(), seed=seed), seed=1)
    # All examples but one are the same.
    x, y = some_data(EXAMPLES, 0)
    y = np.array(y)
    y[1] = (y[1] + 1) % 2
    corrected = build(loss=Nothing(), seed=seed)
    before = corrected.per_example.layer.get_weights()
    corrected.fit(x, y, verbose=0)
    pairs = zip(before, corrected.per_example.layer.get_weights(), strict=True)
    draws["a label"] = np.concatenate([(after - each).ravel() for each, after in pairs])
    for name, found in draws.items():
        for factor in (0.5, 1, 2):
            assert np.isclose(found, factor * first, rtol=1e-3).mean() < 0.2, name


@pytest.mark.long
def test_the_same_training_ends_the_same():
    """Also where it is broken off and begun anew by the same object, or takes up weights of another."""

    options = {"seed": 3, "target_epsilon": 50.0, "epochs": 4}
    private = build(**options)
    fit(private)
    begun, state = private.get_weights(), [each.numpy() for each in private.optimizer.variables]
    history = fit(private, 3, initial_epoch=1).history
    expected = private.get_weights()
    for found in (private, build(**options)):
        found.set_weights(begun)
        for variable, value in zip(found.optimizer.variables, state, strict=True):
            variable.assign(value)
        again = fit(found, 3, initial_epoch=1).history
        for one, other in zip(found.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        spent(found, (found.privacy.noise_multiplier, RATE, 6))
        assert again["epsilon"][-1] == history["epsilon"][-1]


@pytest.mark.parametrize("changed", [False, True])
def test_values_that_frozen_weights_get_are_unknown(changed):
    private = build()
    inner = private.per_example.layer.layers[0]
    inner.trainable = False
    compile_again(private)
    fit(private)
    if changed:
        inner.set_weights([each + 0.125 for each in inner.get_weights()])
    assert math.isinf(private.privacy.epsilon) == changed
    inner.trainable = True
    compile_again(private)
    fit(private)
    if not changed:
        spent(private, (0.5, RATE, 4))


@pytest.mark.parametrize("way", ["averaged", "float32", "old variables"])
def test_updates_of_which_nothing_is_known(first, tmp_path, caplog, way):
    second = build(4.0, examples=EXAMPLES)
    weights = [*first.get_weights()[:2], *(each + 0.125 for each in first.get_weights()[2:])]

    def load():
        if way == "averaged":
            second.set_weights([weights[0], weights[1] / 2, *weights[2:]])
        elif way == "float32":
            second.set_weights([each.astype("float32") for each in weights])
        else:
            # As a checkpoint from before the ledger.
            second._updates.assign(4)

    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        for _ in range(2):
            load()
            assert second.privacy.updates == 4
            assert math.isinf(second.privacy.epsilon)
    assert caplog.text.count("isn't known, so epsilon is infinite") == 1
    assert "Of 4 updates the noise and the sampling are not known" in second.privacy.statement()
    assert "nothing can be promised" in second.privacy.statement()
    second.save_weights(tmp_path / "again.weights.h5")
    third = build(4.0, examples=EXAMPLES)
    third.load_weights(tmp_path / "again.weights.h5")
    assert math.isinf(third.privacy.epsilon)
    assert third.privacy.updates == 4
    if way == "averaged":
        assert math.isinf(fit(second).history["epsilon"][0])
        second.privacy.replace_unknown((0.5, RATE, 4))
        spent(second, (0.5, RATE, 4), (4.0, RATE, 2))
    else:
        second.privacy.replace_unknown((0.5, RATE, 4))
        spent(second, (0.5, RATE, 4))


def test_weights_that_are_replaced_outside_of_fit(caplog):
    private = build(0.5)
    layer = private.per_example.layer
    layer.layers[0].set_weights([np.ones_like(each) for each in layer.layers[0].get_weights()])
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        # To begin with, weights are what the model was trained on before.
        fit(private)
        fit(private)
        spent(private, (0.5, RATE, 4))
        assert "isn't known" not in caplog.text
        layer.layers[0].set_weights([2.5 * np.ones_like(each) for each in layer.layers[0].get_weights()])
        fit(private)
    assert math.isinf(private.privacy.epsilon)
    assert "How sequential" in caplog.text
    assert "hidden/kernel" in caplog.text
    assert "Some weights were replaced outside of training" in private.privacy.statement()
    # They are no secret of this model's: another one may begin with them.
    other = build(0.5)
    other.per_example.layer.layers[0].set_weights([2.5 * np.ones((5, 6)), 2.5 * np.ones(6)])
    fit(other)
    spent(other, (0.5, RATE, 2))
    with pytest.raises(ValueError, match="`noise_multiplier` is -1"):
        private.privacy.replace_unknown((-1, 0.1, 3))
    private.privacy.replace_unknown()
    spent(private, (0.5, RATE, 6))


def test_a_budget_is_not_known_to_be_left():
    private = build(target_epsilon=3.0, epochs=3)
    private.set_weights([np.int64(4), *build().get_weights()[1:]])
    with pytest.raises(ValueError, match=r"epsilon is inf, .* write private.privacy.replace_unknown\("):
        fit(private)
    private.privacy.replace_unknown((20.0, RATE, 4))
    fit(private)
    spent(private, (20.0, RATE, 4), (private.privacy.noise_multiplier, RATE, 2))


def test_as_an_event_of_dp_accounting(first):
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(first.privacy.event)
    assert accountant.get_epsilon(DELTA) == pytest.approx(first.privacy.epsilon, rel=1e-3)
    second = build()
    second.set_weights([np.int64(99), *second.get_weights()[1:]])
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(second.privacy.event)
    assert math.isinf(accountant.get_epsilon(DELTA))


def test_a_file_has_room_for_any_number_of_runs():
    events = [Event(noise, 0.1) for noise in (1.0, 2.0)] + [Event(3.0 + place, 0.2) for place in range(20)]
    entries = [Entry(2 + place, 1, 2, 3, events[place % len(events)], place + 1) for place in range(3 * ROWS)]
    read = entries_of(table_of(entries), sum(entry.updates for entry in entries) + 5)
    assert len(read) == ROWS
    assert read[-1] == entries[-1].with_updates(entries[-1].updates + 5)
    assert sum(entry.updates for entry in read[:-1]) == sum(entry.updates for entry in entries[:-1])
    costs = [
        composed_epsilon([Updates(*entry.event[:2], entry.updates) for entry in each], 1e-5) for each in (entries, read)
    ]
    assert costs[0] <= costs[1] < 1.2 * costs[0]


def test_a_compiled_model_is_to_be_compiled_again():
    model = perceptron()
    model.compile("sgd", cross_entropy())
    private = make_private(model, clip_norm=1.0, expected_batch_size=SIZE, delta=DELTA, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"takes over nothing .* Write private.compile\(optimizer, loss\) before fit"):
        fit(private)
