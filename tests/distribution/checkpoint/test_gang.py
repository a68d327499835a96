"""Two workers that are killed, stopped and started again end where undisturbed ones do."""

import os
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from trainings.backed_up import BATCH_SIZE, EPOCHS, STEPS, build, data

from keras_paragrad import ExactAccumulation
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.files import BackupFiles, Position

TOLERANCE = 1e-6
DRAW = random.Random(4)
# Two backups, every third batch, are there by then.
KILLED_AFTER, STOPPED_AFTER = DRAW.randrange(7, STEPS), DRAW.randrange(STEPS, 2 * STEPS - 8)


@pytest.fixture(scope="module")
def story(gang):
    """Undisturbed training; then SIGKILL, a truncated backup, SIGTERM, and the end with directories of their own."""
    shared = gang.folder / "backups"
    files = {"directory": str(shared), "log": str(gang.folder / "log.csv"), "checkpoint": _checkpoint(gang.folder)}
    first = {**files, "undisturbed": True}
    killed = gang.run("killed", [first, {**first, "signal": "SIGKILL", "after": KILLED_AFTER}])
    after_kill = BackupFiles(shared).paths()
    assert len(after_kill) == 2, killed[0].printed[-6000:]
    (archive,) = BackupFiles(shared).read(after_kill[0]).archives
    os.truncate(shared / archive.name, archive.size - 7)
    stopped = gang.run("stopped", [files, {**files, "after": STOPPED_AFTER}])
    shutil.copytree(shared, gang.folder / "copied")
    damaged, copied, empty = _damaged_copy(shared), str(gang.folder / "copied"), str(gang.folder / "empty")
    chief = {**files, "refused": [(damaged,), (empty,), (empty, 3)]}
    other = {**files, "refused": [(damaged,), (copied,), (empty, 4)], "directory": empty}
    finished = gang.run("finished", [chief, other])
    return SimpleNamespace(
        folder=gang.folder, shared=shared, killed=killed, after_kill=after_kill, stopped=stopped, finished=finished
    )


def _checkpoint(folder: Path) -> str:
    return str(folder / "checkpoints" / "{epoch}.weights.h5")


def _damaged_copy(directory: Path) -> str:
    copied = Path(shutil.copytree(directory, directory.with_name("all_damaged")))
    for path in copied.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    return str(copied)


def weights(story, run, worker, name):
    with np.load(story.folder / f"{run}-{worker}.jsonl.{name}.npz") as saved:
        return [saved[str(index)] for index in range(len(saved.files))]


def check_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE, rtol=0)


@pytest.mark.long
def test_a_killed_worker_ends_the_other_with_a_reason(story):
    survivor, victim = story.killed
    assert victim.status == -signal.SIGKILL
    assert survivor.status == 1, survivor.printed[-3000:]
    assert survivor.notes["lost"].startswith("Worker 0 of 2 lost its connection to worker 1 (127.0.0.1:")
    assert "launch --max-restarts" in survivor.notes["lost"]
    assert survivor.notes["seconds"] < 30


@pytest.mark.long
def test_a_killed_gang_leaves_whole_backups(story):
    positions = [path.name for path in story.after_kill]
    last = KILLED_AFTER // 3 * 3
    assert positions == [f"epoch-000000-batch-{batch:010d}.backup" for batch in (last, last - 3)]


def test_a_truncated_backup_is_passed_by(story):
    chief = story.stopped[0]
    assert "A damaged backup is not used" in chief.printed
    assert f"{story.after_kill[0]}: " in chief.printed
    for worker in story.stopped:
        assert worker.notes["seen"][0] == KILLED_AFTER // 3 * 3 - 3


def test_sigterm_to_one_stops_both_after_the_same_batch(story):
    begun = KILLED_AFTER // 3 * 3 - 3
    epoch, batch = divmod(begun + STOPPED_AFTER, STEPS)
    for worker in story.stopped:
        assert worker.status == 143, worker.printed[-3000:]
        assert len(worker.notes["seen"]) == STOPPED_AFTER
    at_stop = BackupFiles(story.folder / "copied").paths()
    assert at_stop[0].name == f"epoch-{epoch:06d}-batch-{batch:010d}.backup"
    assert BackupFiles(story.folder / "copied").read(at_stop[0]).position == Position(epoch, batch)
    assert story.stopped[0].printed.count("SIGTERM: training stops in epoch") == 1


def test_damaged_backups_stop_every_worker_and_stay(story):
    for worker in story.finished:
        assert "None of the backups in" in worker.notes["refused"][0]
    assert all(path.stat().st_size == 100 for path in (story.folder / "all_damaged").glob("*.backup"))


def test_a_chief_without_backups_does_not_begin_anew(story):
    for worker in story.finished:
        assert worker.notes["refused"][1].startswith("The chief, worker 0, sees no backup in")
        assert "but worker 1 sees 2" in worker.notes["refused"][1]


def test_different_settings_stop_every_worker(story):
    for worker in story.finished:
        assert "callbacks[1].every: 3 on worker 0, 4 on worker 1" in worker.notes["refused"][2]


@pytest.mark.parametrize("worker", [0, 1])
def test_the_weights_are_those_of_undisturbed_workers(story, worker):
    assert story.finished[worker].status == 0, story.finished[worker].printed[-3000:]
    check_equal(weights(story, "finished", worker, "final"), weights(story, "killed", worker, "undisturbed"))


def test_what_fit_returns_is_that_of_undisturbed_workers(story):
    found, expected = story.finished[1].notes, story.killed[1].notes
    assert found["updates"] == expected["updates"] == EPOCHS * STEPS // 5
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, atol=TOLERANCE, rtol=0)


def test_backups_are_removed_in_the_end(story):
    """Not the directory, which was there when the last process began."""
    assert not list(story.shared.iterdir())


def test_one_worker_writes_checkpoints_and_log(story):
    written = sorted(path.name for path in (story.folder / "checkpoints").iterdir())
    assert written == [f"{epoch + 1}.weights.h5" for epoch in range(EPOCHS)]
    model = build()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(story.folder / "checkpoints" / written[-1])
    assert model.optimizer.iterations.numpy() == EPOCHS * STEPS // 5
    assert (story.folder / "log.csv").read_text().count("\n") == EPOCHS + 1


def test_one_process_goes_on_from_two_workers(story):
    straight, resumed = build(), build()
    for model, callbacks in ((straight, []), (resumed, [Backup(story.folder / "copied")])):
        keras.utils.set_random_seed(0)
        model.fit(
            *data(),
            batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[ExactAccumulation(), *callbacks],
        )
    check_equal(resumed.get_weights(), straight.get_weights())
    check_equal(resumed.get_weights(), weights(story, "killed", 0, "undisturbed"))
