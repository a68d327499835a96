"""One process that is broken off and started again ends where an undisturbed one does."""

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.histories import CASES, MICRO_BATCHES, MicroBatches, assert_same
from trainings.backed_up import BATCH_SIZE, EPOCHS, STEPS, build, data, limited_files

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.content import Content, UnstorableError
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Position
from keras_paragrad.distribution.checkpoint.interruptions import TrainingInterrupted
from keras_paragrad.distribution.checkpoint.resuming import common_backup
from keras_paragrad.distribution.replicas.parallelism import ReplicaPreparation


class BreakOff(keras.callbacks.Callback):
    """Does something after so many batches of one `fit`."""

    def __init__(self, after, action):
        super().__init__()
        self.left, self.action = after, action

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.action()


def interrupt():
    raise KeyboardInterrupt


def send_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def fit(model, callbacks, epochs=EPOCHS, **options):
    try:
        return model.fit(
            *data(), batch_size=BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks, **options
        )
    except BaseException:
        # As `dist.fit` does: what is being written is in the directory then.
        for backup in callbacks:
            if isinstance(backup, Backup):
                backup.leave()
        raise


def newest(directory):
    return common_backup(tf.distribute.get_strategy(), BackupFiles(directory))[0]


def named(directory):
    """The names of all manifests; each has an archive."""
    manifests = sorted(path.name for path in directory.glob("*.backup"))
    assert len([*directory.iterdir()]) == 2 * len(manifests)
    return manifests


def falling(epoch, rate):
    return rate * 0.7


def watchers():
    """Callbacks with a state that decides how training goes on."""
    return [
        keras.callbacks.LearningRateScheduler(falling),
        keras.callbacks.ReduceLROnPlateau("accuracy", patience=1, min_delta=10.0, factor=0.3),
        keras.callbacks.EarlyStopping("accuracy", patience=3, min_delta=10.0, restore_best_weights=True),
    ]


def plain(optimizer=None, jit_compile=False, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.4), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile, **options)
    return model


def prepared(**options):
    model = plain(**options)
    ReplicaPreparation(model)
    return model


MAKERS = {
    "plain": lambda: plain(keras.optimizers.Nadam(0.01)),
    "prepared": prepared,
    "steps_per_execution": lambda: prepared(steps_per_execution=4),
    "jit": lambda: prepared(jit_compile=True),
    "accumulating": lambda: build(0.4),
}


IN_THE_END, BETWEEN_EPOCHS, EARLY = 2 * STEPS + 7, STEPS, 4
SHORT = {
    ("plain", 1): (IN_THE_END, BETWEEN_EPOCHS, EARLY),
    ("accumulating", 5): (EARLY + 1,),
}
LONG = [("plain", "epoch"), ("accumulating", "epoch"), *((kind, 5) for kind in MAKERS)]


@pytest.mark.few(0, "plain-1-(31, 12, 4)")
@pytest.mark.parametrize(
    ("kind", "every", "breaks"),
    [
        *((*case, breaks) for case, breaks in SHORT.items()),
        *(pytest.param(*case, (IN_THE_END, BETWEEN_EPOCHS, EARLY), marks=pytest.mark.long) for case in LONG),
    ],
    ids=str,
)
def test_resumed_equals_undisturbed(kind, every, breaks, tmp_path):
    exact = [ExactAccumulation()] if kind == "accumulating" else []
    # In the fourth epoch of five, after which early stopping ends it.
    straight = MAKERS[kind]()
    expected = fit(straight, [*exact, *watchers()], epochs=5)
    for after in breaks:
        others, model = watchers(), MAKERS[kind]()
        with pytest.raises(KeyboardInterrupt):
            after = -(-after // 4) if kind == "steps_per_execution" else after
            breaks = BreakOff(after, interrupt)
            fit(model, [*exact, *others, Backup(tmp_path, every, callbacks=others), breaks], epochs=5)
    others, resumed = watchers(), MAKERS[kind]()
    history = fit(resumed, [*exact, *others, Backup(tmp_path, every, callbacks=others)], epochs=5)
    for one, other in zip(resumed.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
    assert history.epoch == expected.epoch
    assert not [*tmp_path.iterdir()]


def test_a_new_position_in_the_middle_of_a_window(tmp_path):
    model = build()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [ExactAccumulation(), Backup(tmp_path, every=3), BreakOff(8, interrupt)])
    resumed = build()

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.position, self.logs = int(self.model.optimizer.window.position.numpy()), logs
            raise KeyboardInterrupt

    look = Look()
    with pytest.raises(KeyboardInterrupt):
        fit(resumed, [ExactAccumulation(), Backup(tmp_path, every=3), look])
    # Six batches, a window of five: one is in the next, and the first call passes over a batch that was seen.
    assert (look.position, look.logs) == (1, {})


def fit_in_windows(case, sizes, strategy=None, callbacks=()):
    """One epoch in windows of three batches of these sizes, whose losses are divided by masks."""
    dist = DistributedFit(strategy=strategy, jit=False) if strategy else None
    with dist.scope() if dist else contextlib.nullcontext():
        model = case.model(AccumulatingOptimizer(keras.optimizers.SGD(0.05), 3), run_eagerly=True)
    if dist:
        dist.prepare(model)
    batches = MicroBatches(case.columns, sizes)
    data = dist.dataset(batches) if dist else batches
    return model.fit(data, verbose=0, shuffle=False, callbacks=[ExactAccumulation(), *callbacks]).history


def check_windows(directory, names, breaks, strategy=None, sizes=MICRO_BATCHES):
    for name in names:
        case = CASES[name]
        expected = fit_in_windows(case, sizes, strategy)
        for after in breaks:
            with pytest.raises(KeyboardInterrupt):
                fit_in_windows(case, sizes, strategy, [Backup(directory, every=1), BreakOff(after, interrupt)])
            assert_same(fit_in_windows(case, sizes, strategy, [Backup(directory, every=1)]), expected)


@pytest.mark.long
def test_losses_are_those_of_undisturbed_windows(tmp_path):
    # The first batch that follows is the second of its window, the last of it, and the first.
    check_windows(tmp_path / "backups", ("mask",), (1, 2, 3))
    check_windows(tmp_path / "backups", ("two outputs",), (2,))


@pytest.mark.long
@pytest.mark.own_process
def test_losses_are_those_of_undisturbed_windows_on_replicas(mirrored, tmp_path):
    # A window of which two batches come before, and the last after: eager steps of replicas take long.
    check_windows(tmp_path / "backups", ("mask",), (3,), mirrored, MICRO_BATCHES[:3])


# In `make test`, test_shards.py goes from two replicas to one, in shards; accumulation/test_saving.py by files.
@pytest.mark.long
@pytest.mark.own_process
def test_two_replicas_to_one(mirrored, tmp_path):
    with mirrored.scope():
        parallel = build()
    ReplicaPreparation(parallel)
    with pytest.raises(KeyboardInterrupt):
        fit(parallel, [ExactAccumulation(), Backup(tmp_path, every=4), BreakOff(STEPS + 9, interrupt)])
    straight, resumed = build(), build()
    # Tracing takes longer than the steps.
    straight.run_eagerly = resumed.run_eagerly = True
    expected = fit(straight, [ExactAccumulation()])
    found = fit(resumed, [ExactAccumulation(), Backup(tmp_path, every=4)])
    for one, other in zip(resumed.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], atol=1e-6)


def test_sigterm_leaves_with_status_143_and_a_backup(tmp_path, caplog):
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(TrainingInterrupted) as ended:
            fit(plain(), [BreakOff(STEPS + 5, send_sigterm), Backup(tmp_path)])
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [signal.SIGTERM]
    assert (ended.value.code, ended.value.position, ended.value.saved) == (143, Position(1, 5), True)
    assert "training stops in epoch 2, after 5 batches" in caplog.text
    assert newest(tmp_path).position == Position(1, 5)


def test_sigterm_with_the_last_batch_of_an_epoch_waits_for_its_end(tmp_path):
    with pytest.raises(TrainingInterrupted) as ended:
        fit(plain(), [BreakOff(EPOCHS * STEPS, send_sigterm), Backup(tmp_path)], validation_split=0.0)
    assert ended.value.position == Position(EPOCHS, 0)
    model, straight = plain(), plain()
    history, expected = fit(model, [Backup(tmp_path)]), fit(straight, [])
    np.testing.assert_array_equal(model.get_weights()[0], straight.get_weights()[0])
    assert history.history == expected.history


def test_the_handler_is_gone_after_fit(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    backup = Backup(tmp_path)
    fit(plain(), [backup])
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyboardInterrupt):
        fit(plain(), [backup, BreakOff(1, interrupt)])
    backup.leave()
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_it_is_said(tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=fit, args=(plain(), [Backup(tmp_path)]))
    thread.start()
    thread.join()
    assert "Call fit in the main thread" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


class FullDisk(keras.callbacks.Callback):
    """Lets no file grow beyond 1000 bytes from one epoch on, once there is a backup."""

    def __init__(self, epoch, directory):
        super().__init__()
        self.epoch, self.directory, self.limit = epoch, directory, limited_files(1000)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            deadline = time.monotonic() + 30
            while not list(self.directory.glob("*.backup")) and time.monotonic() < deadline:
                time.sleep(0.01)
            self.limit.__enter__()


def test_training_goes_on_with_a_full_disk(tmp_path, caplog):
    model, straight = plain(), plain()
    full = FullDisk(1, tmp_path)
    try:
        fit(model, [full, Backup(tmp_path, delete_when_done=False)], epochs=4)
    finally:
        full.limit.__exit__(None, None, None)
    fit(straight, [], epochs=4)
    np.testing.assert_array_equal(model.get_weights()[0], straight.get_weights()[0])
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "No backup could be written at epoch 3: [Errno 27] File too large" in said[0]
    assert "the last one is epoch-000001-batch-0000000000.backup. Free some space in" in said[0]
    assert named(tmp_path) == ["epoch-000001-batch-0000000000.backup"]


def test_sigterm_with_a_full_disk_says_so(tmp_path, monkeypatch, caplog):
    def full(self, position, key, archives):
        raise OSError("no space")

    monkeypatch.setattr(BackupFiles, "commit", full)
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 2 and os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(TrainingInterrupted) as stopped:
        fit(plain(), [stop, Backup(tmp_path)])
    assert not stopped.value.saved
    assert "no backup could be written. Run the same command" in caplog.text
    assert not [*tmp_path.iterdir()]


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [OSError, UnstorableError])
def test_a_failure_keeps_no_copy_of_the_state(error, tmp_path, monkeypatch):
    copies = []

    def fail(self):
        raise error("not now")

    def remember(self, *words):
        content = contents(self, *words)
        copies.extend(weakref.ref(value) for value in content.values["model"])
        if error is UnstorableError:
            raise UnstorableError("not now")
        return content

    contents = Backup._content
    monkeypatch.setattr(Content, "arrays", fail)
    monkeypatch.setattr(Backup, "_content", remember)
    gc.disable()
    try:
        fit(plain(), [Backup(tmp_path, every=4)], epochs=1)
    finally:
        gc.enable()
    assert copies
    assert not any(copy() is not None for copy in copies)


def test_training_goes_on_while_a_backup_is_written(tmp_path, monkeypatch):
    may_flush, flush, model, after = threading.Event(), os.fsync, plain(), {}

    def slow_flush(file):
        assert may_flush.wait(60)
        flush(file)

    def look(batch, logs):
        after[batch + 1] = model.get_weights()
        if batch + 1 == 9:
            assert not list(tmp_path.glob("*.backup"))
            may_flush.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", slow_flush)
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    with pytest.raises(KeyboardInterrupt):
        fit(model, [Backup(tmp_path, every=5), watch])
    # The weights after the fifth step, which four more have changed since.
    stored = newest(tmp_path)
    assert stored.position == Position(0, 5)
    content = stored.content
    pairs = zip(content.names["model"], content.values["model"], strict=True)
    weights = [value for name, value in pairs if "seed" not in name]
    for one, expected, later in zip(weights, after[5], after[9], strict=True):
        np.testing.assert_array_equal(one, expected)
        assert not np.array_equal(one, later)


def test_a_defect_of_the_writer_ends_training(tmp_path, monkeypatch):
    def broken(self, position, key, archives):
        raise RuntimeError("a defect")

    monkeypatch.setattr(BackupFiles, "commit", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        fit(plain(), [Backup(tmp_path)])


def test_only_damaged_backups_stop_it(tmp_path):
    fit(plain(), [Backup(tmp_path, delete_when_done=False)])
    for path in tmp_path.iterdir():
        os.truncate(path, 50)
    with pytest.raises(DamagedBackupError, match="None of the backups in .* is intact, and nothing has been changed"):
        fit(plain(), [Backup(tmp_path)])
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [50] * 4


def test_a_backup_of_another_model_is_refused(tmp_path):
    fit(plain(), [Backup(tmp_path, delete_when_done=False)])
    with pytest.raises(
        ValueError, match=r"sequential_\d+/dense_\d+/kernel of shape \(4, 2\) and float32, where they have"
    ):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0, callbacks=[Backup(tmp_path)])
    with pytest.raises(ValueError, match="The model has no variables yet"):
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("adam", "mse")
        model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0, callbacks=[Backup(tmp_path)])


def test_another_first_epoch_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(plain(), [Backup(tmp_path, every=2), BreakOff(5, interrupt)])
    with pytest.raises(ValueError, match="fit starts with epoch 2, but the backup .* is at epoch 1, after 4 batch"):
        fit(plain(), [Backup(tmp_path)], initial_epoch=1)


def broken_off(path, after, every="epoch"):
    with pytest.raises(KeyboardInterrupt):
        fit(plain(), [Backup(path, every), BreakOff(after, interrupt)])


def sizes(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_an_epoch_outside_of_fit_is_refused(tmp_path):
    broken_off(tmp_path, 2 * STEPS + 7, every=6)
    before = sizes(tmp_path)
    with pytest.raises(ValueError, match=r"is at epoch 3, after 6 batches. This fit ends with epoch 2. .*epochs=3 "):
        fit(plain(), [Backup(tmp_path)], epochs=2)
    with pytest.raises(ValueError, match="This fit ends with epoch 1."):
        fit(plain(), [Backup(tmp_path)], epochs=1)
    assert sizes(tmp_path) == before


def test_with_the_last_epoch_done_it_is_said_that_nothing_is_left(tmp_path, caplog):
    broken_off(tmp_path, 2 * STEPS + 7)
    fit(plain(), [Backup(tmp_path)], epochs=2)
    assert "Nothing is left to train" in caplog.text
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "after"),
    [
        pytest.param({"batch_size": 2 * BATCH_SIZE}, STEPS + 7, id="batch_size-in-an-epoch"),
        pytest.param({"steps_per_epoch": 3}, STEPS + 1, id="steps_per_epoch-between-epochs"),
        pytest.param({"batch_size": 2 * BATCH_SIZE}, STEPS + 1, id="batch_size-between-epochs", marks=pytest.mark.long),
        pytest.param({"steps_per_epoch": 3}, STEPS + 7, id="steps_per_epoch-in-an-epoch", marks=pytest.mark.long),
    ],
)
def test_another_number_of_steps_is_refused(after, options, tmp_path):
    broken_off(tmp_path, after, every=3 if after > STEPS + 1 else "epoch")
    before = sizes(tmp_path)
    steps = options.get("steps_per_epoch", STEPS // 2)
    says = f"had {STEPS} batches, but this fit's have {steps}. Use the same data"
    with pytest.raises(ValueError, match=says):
        plain().fit(*data(), **{"batch_size": BATCH_SIZE, **options}, epochs=3, verbose=0, callbacks=[Backup(tmp_path)])
    assert sizes(tmp_path) == before


def test_a_batch_outside_of_data_of_unknown_length_is_refused(tmp_path):
    def of_unknown_length(batches):
        dataset = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH_SIZE)
        return dataset.take(batches).filter(lambda *batch: True)

    breaks = [Backup(tmp_path, 5), BreakOff(8, interrupt)]
    with pytest.raises(KeyboardInterrupt):
        plain().fit(of_unknown_length(12), shuffle=False, verbose=0, callbacks=breaks)
    model = plain()
    before = sizes(tmp_path)
    with pytest.raises(ValueError, match="The data ended before the batch at which training was to resume. Give fit"):
        model.fit(of_unknown_length(4), shuffle=False, verbose=0, callbacks=[Backup(tmp_path, 5)])
    with pytest.raises(ValueError, match="after 5 batches. The epochs of this fit have 4 batches"):
        model.fit(*data(), batch_size=BATCH_SIZE, steps_per_epoch=4, verbose=0, callbacks=[Backup(tmp_path, 5)])
    assert sizes(tmp_path) == before
    # The model passes over nothing that a later fit has not seen.
    assert model.fit(of_unknown_length(4), shuffle=False, verbose=0).history["loss"]


class Remembering(keras.callbacks.Callback):
    """Has the state that it is given."""

    def __init__(self, state):
        super().__init__()
        self.state, self.restored = state, False

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state, self.restored = state, True


def test_any_state_comes_back(tmp_path):
    states = [{"array": 0}, {1: (2, b"3")}, None]
    own = [Remembering(state) for state in states]
    with pytest.raises(KeyboardInterrupt):
        fit(plain(), [*own, Backup(tmp_path, callbacks=own), BreakOff(STEPS + 1, interrupt)])
    own = [Remembering("as it begins") for _ in states]
    fit(plain(), [*own, Backup(tmp_path, callbacks=own)])
    for each, state in zip(own, states, strict=True):
        assert each.restored, state
        assert each.state == state
        assert type(each.state) is type(state)


def test_a_state_that_can_not_be_stored_is_refused_when_training_begins(tmp_path):
    seen = Remembering({"seen": {1, 2}})
    look = BreakOff(1, interrupt)
    with pytest.raises(
        TypeError, match=r"callback Remembering 0\['seen'\] is \{1, 2\}, of type set.*Convert it in get_"
    ):
        fit(plain(), [seen, Backup(tmp_path, callbacks=[seen]), look])
    assert look.left == 1


@pytest.mark.long
def test_a_state_that_can_no_longer_be_stored_does_not_end_training(tmp_path, caplog):
    class Draws(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch:
                logs["figure"] = object()

    model, straight = plain(), plain()
    fit(model, [Draws(), Backup(tmp_path, delete_when_done=False)])
    fit(straight, [])
    np.testing.assert_array_equal(model.get_weights()[0], straight.get_weights()[0])
    assert "the callback History 0['history']['figure'][0] is <object object" in caplog.text
    assert "Training continues, and retries; until then the last one is epoch-000001" in caplog.text
    assert named(tmp_path) == ["epoch-000001-batch-0000000000.backup"]


@pytest.mark.long
def test_a_callback_of_ones_own(tmp_path):
    class Own(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen, self.table = 0, np.zeros(3)

        def on_train_batch_end(self, batch, logs=None):
            self.seen += bool(logs)
            self.table[batch % 3] += bool(logs)

        def get_state(self):
            return {"seen": self.seen, "table": self.table}

        def set_state(self, state):
            self.seen, self.table = state["seen"], state["table"].copy()

    own = Own()
    with pytest.raises(KeyboardInterrupt):
        fit(plain(), [own, Backup(tmp_path, 5, callbacks=[own]), BreakOff(13, interrupt)])
    own = Own()
    fit(plain(), [own, Backup(tmp_path, 5, callbacks=[own])])
    assert own.seen == EPOCHS * STEPS
    np.testing.assert_array_equal(own.table, [EPOCHS * STEPS / 3] * 3)


@pytest.mark.long
def test_a_scaled_loss_goes_on_with_its_scale(tmp_path):
    def scaled():
        model = plain()
        inner = AccumulatingOptimizer(keras.optimizers.Adam(0.01), 2, tail="carry")
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=4)
        model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
        return model

    model, straight = scaled(), scaled()
    with pytest.raises(KeyboardInterrupt):
        fit(scaled(), [ExactAccumulation(), Backup(tmp_path, 5), BreakOff(STEPS + 7, interrupt)])
    fit(model, [ExactAccumulation(), Backup(tmp_path, 5)])
    fit(straight, [ExactAccumulation()])
    for one, other in zip(model.optimizer.variables, straight.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.long
def test_bfloat16_comes_back(tmp_path):
    def half():
        model = plain()
        inner = AccumulatingOptimizer(keras.optimizers.SGD(0.01), 5, tail="carry", accumulator_dtype="bfloat16")
        model.compile(inner, "sparse_categorical_crossentropy", jit_compile=False)
        return model

    model, straight = half(), half()
    with pytest.raises(KeyboardInterrupt):
        fit(half(), [ExactAccumulation(), Backup(tmp_path, 3), BreakOff(7, interrupt)])
    fit(model, [ExactAccumulation(), Backup(tmp_path, 3)])
    fit(straight, [ExactAccumulation()])
    np.testing.assert_array_equal(model.get_weights()[0], straight.get_weights()[0])
