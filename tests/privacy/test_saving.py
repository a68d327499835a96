"""Training that is broken off, saved and gone with, and what the files hold."""

import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.private_updates import cross_entropy, perceptron, some_data
from oracles.saving import FORMATS, saved_and_loaded
from runner import graphs

from keras_paragrad.distribution import Backup
from keras_paragrad.privacy import AdaptiveClip, make_private

EPOCHS, SIZE, SEED = 2, 15, 77123456789
EXAMPLES = 30


def build(clip_norm=0.5, seed=SEED):
    """A private model that is trained without a graph: tracing takes longer than the few updates."""
    private = make_private(
        *(perceptron(),),
        clip_norm=clip_norm,
        target_epsilon=50.0,
        epochs=EPOCHS,
        expected_batch_size=SIZE,
        delta=1e-3,
        physical_batch_size=8,
        seed=seed,
    )
    private.compile(keras.optimizers.Adam(0.05), cross_entropy(), metrics=["accuracy"], run_eagerly=True)
    return private


def weights_of(private):
    return [*private.get_weights(), *(each.numpy() for each in private.optimizer.variables)]


@pytest.fixture(scope="module")
def undisturbed():
    # It is made before the test says whether graphs are optimized, which changes the last digits.
    graphs.leave_unoptimized()
    private = build()
    private.fit(*some_data(EXAMPLES), epochs=EPOCHS, verbose=0)
    return weights_of(private)


class Stop(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise InterruptedError


# In the middle of the first epoch, or of the second, before which one has been counted.
@pytest.mark.parametrize("batches", [pytest.param(1, marks=pytest.mark.long), 3])
def test_resumed_from_our_backup_equals_undisturbed(tmp_path, undisturbed, batches):
    backup = Backup(tmp_path, every=1, on_sigterm=False)
    with pytest.raises(InterruptedError):
        build().fit(*some_data(EXAMPLES), epochs=EPOCHS, verbose=0, callbacks=[backup, Stop(batches)])
    private = build()
    private.fit(*some_data(EXAMPLES), epochs=EPOCHS, verbose=0, callbacks=[Backup(tmp_path, every=1, on_sigterm=False)])
    for one, other in zip(weights_of(private), undisturbed, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_resumed_from_keras_backup_equals_undisturbed(tmp_path, undisturbed):
    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    with pytest.raises(InterruptedError):
        build().fit(*some_data(EXAMPLES), epochs=EPOCHS, verbose=0, callbacks=[backup(), Stop(3)])
    private = build()
    private.fit(*some_data(EXAMPLES), epochs=EPOCHS, verbose=0, callbacks=[backup()])
    for one, other in zip(weights_of(private), undisturbed, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize("clip_norm", [0.5, {"hidden": 0.2, "out": 0.4}, AdaptiveClip(initial=0.5)], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_saved_model_goes_on_counting(tmp_path, form, clip_norm):
    x, y = some_data(EXAMPLES)
    private = build(clip_norm)
    private.fit(x, y, epochs=1, verbose=0)
    loaded = saved_and_loaded(private, lambda: build(clip_norm), form, tmp_path)
    assert loaded.privacy.updates == len(x) / SIZE
    loaded.set_seed(SEED)
    for model in (private, loaded):
        model.fit(x, y, epochs=2, initial_epoch=1, verbose=0)
    assert loaded.privacy.epsilon == private.privacy.epsilon
    for one, other in zip(weights_of(loaded), weights_of(private), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_file_has_the_key(tmp_path):
    """Whoever has key and weights can subtract the noise."""
    private = build()
    private.fit(
        *some_data(EXAMPLES), epochs=1, verbose=0, callbacks=[Backup(tmp_path, every=1, delete_when_done=False)]
    )
    private.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        archive.extractall(tmp_path / "unpacked")
    words = np.asarray(private._releases.key.numpy())
    secrets = [str(SEED).encode(), *(form.tobytes() for form in (words, words[:1], words[2:3], words[3:]))]
    secrets += [str(word).encode() for word in [*words, *words.astype(np.uint64)]]
    read = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(read) > 4
    assert not [secret for secret in secrets for content in read if secret in content]


def test_files_hold_no_gradient_without_noise(tmp_path):
    """An update is one step, so there is nothing in between: what is saved are weights, slots and counts."""
    private = build()
    private.fit(*some_data(EXAMPLES), epochs=1, verbose=0)
    names = {variable.path for variable in [*private.variables, *private.optimizer.variables]}
    assert all(
        any(part in name for part in ("hidden", "out", "updates", "ledger", "iteration", "learning_rate"))
        for name in names
    )


@pytest.mark.long
def test_no_file_has_a_count_without_noise(tmp_path):
    """An adaptive norm counts examples on the way through an update."""
    private = build(AdaptiveClip(initial=0.5))
    private.fit(*some_data(EXAMPLES), epochs=1, verbose=0)
    marked, visible = (np.float32(each) for each in (12345.678, 8765.4321))
    private.per_example.state._within.assign(marked)
    private._log_clip_norm.assign(visible)
    private.save(tmp_path / "model.keras")
    private.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=private, optimizer=private.optimizer).save(str(tmp_path / "checkpoint"))
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        archive.extractall(tmp_path / "unpacked")
    read = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".keras"]
    assert sum(visible.tobytes() in content for content in read) >= 3
    assert not [content for content in read if marked.tobytes() in content]


def test_a_loaded_model_has_another_key(tmp_path):
    private = build()
    private.fit(*some_data(EXAMPLES), epochs=1, verbose=0)
    private.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not np.any(loaded._releases.secret == private._releases.secret)
