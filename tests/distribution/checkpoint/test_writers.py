"""One worker writes files; the others read what it takes all to read."""

import gc
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_paragrad import ExactAccumulation
from keras_paragrad.distribution import with_one_writer


def trained(callbacks, epochs=2):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=epochs, batch_size=2, verbose=0, callbacks=callbacks)


def writing(folder):
    return [
        keras.callbacks.ModelCheckpoint(folder / "saved" / "{epoch}.keras", monitor="loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(folder / "{batch}.weights.h5", save_weights_only=True, save_freq=1),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TerminateOnNaN(),
    ]


def test_the_chief_writes_with_the_callbacks_as_they_are(tmp_path):
    callbacks = writing(tmp_path)
    assert with_one_writer(callbacks, is_chief=True) == callbacks
    trained(with_one_writer(callbacks, is_chief=True))
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert names == {"saved/1.keras", "saved/2.keras", "1.weights.h5", "2.weights.h5", "log.csv"}


def test_another_worker_writes_nothing_that_stays(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    callbacks = writing(tmp_path / "real")
    elsewhere = with_one_writer(callbacks, is_chief=False)
    assert not any(isinstance(callback, keras.callbacks.CSVLogger) for callback in elsewhere)
    assert callbacks[3] in elsewhere
    checkpoints = [each for each in elsewhere if isinstance(each, keras.callbacks.ModelCheckpoint)]
    assert [each.save_best_only for each in checkpoints] == [True, False]
    sizes = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: sizes.append(len([*scratch.rglob("*.*")]))
    )
    trained([*elsewhere, watch])
    assert checkpoints[0].best is not None
    # A file of each takes the place of the one before.
    assert max(sizes) == 2
    assert not (tmp_path / "real").exists()
    assert callbacks[0].filepath == str(tmp_path / "real" / "saved" / "{epoch}.keras")
    elsewhere.clear()
    checkpoints.clear()
    gc.collect()
    assert not [*scratch.iterdir()]


def test_callbacks_of_updates_are_no_exception(tmp_path):
    callback = ExactAccumulation(
        callbacks=[keras.callbacks.TerminateOnNaN(), keras.callbacks.CSVLogger(tmp_path / "log.csv")]
    )
    (elsewhere,) = with_one_writer([callback], is_chief=False)
    assert elsewhere.callbacks == callback.callbacks[:1]
    assert with_one_writer([callback], is_chief=True) == [callback]
    with pytest.raises(ValueError, match=r"dist\.callbacks"):
        with_one_writer([ExactAccumulation(callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])], is_chief=True)


def test_tensorboard_of_another_worker_writes_elsewhere(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path / "logs")
    (elsewhere,) = with_one_writer([board], is_chief=False)
    assert Path(elsewhere.log_dir).parent != tmp_path
    assert board.log_dir == str(tmp_path / "logs")


@pytest.mark.parametrize("is_chief", [True, False], ids=["chief", "other"])
def test_backup_and_restore_is_refused(is_chief, tmp_path):
    with pytest.raises(ValueError, match=r"BackupAndRestore can't .* callbacks=dist.callbacks\(directory\)"):
        with_one_writer([keras.callbacks.BackupAndRestore(tmp_path)], is_chief)
