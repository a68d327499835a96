"""Backups are found whole, or found damaged; and no other file is touched."""

import os
import tempfile

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from runner.covering import examples
from trainings.backed_up import NOT_OURS, limited_files

from keras_paragrad.distribution.checkpoint import files as files_module
from keras_paragrad.distribution.checkpoint.content import Content
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Position, archive_name
from keras_paragrad.distribution.checkpoint.resuming import common_backup

pytestmark = pytest.mark.fast

OLDER, NEWER = Position(0, 3), Position(1, 0)
_keys = iter(range(1, 10**9))


def write(files, position, number=1.0, size=3):
    """A backup of an array."""
    key = f"{next(_keys):016x}"
    content = Content({"model": [np.full(size, number)]}, {"model": ["kernel"]}, {})
    archive = files.write_archive(archive_name(position, key), content.arrays())
    return files.commit(position, key, [archive])


def written(folder, keep=2):
    files = BackupFiles(folder, keep)
    return files, write(files, OLDER, 1.0), write(files, NEWER, 2.0)


def archive_of(files, path):
    (archive,) = files.read(path).archives
    return files.directory / archive.name


def found(files):
    """The position of the newest backup and its number; and the damage to newer ones."""
    stored, damage = common_backup(tf.distribute.get_strategy(), files)
    return stored.position, float(stored.content.values["model"][0][0]), damage


@examples(100, of=300)
@given(st.data())
def test_any_flipped_bit_is_found(data):
    with tempfile.TemporaryDirectory() as folder:
        files, _, newer = written(folder)
        path = data.draw(st.sampled_from([newer, archive_of(files, newer)]), "file")
        damaged = bytearray(path.read_bytes())
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(damaged)
        check_fallback(files, newer)


@examples(40, of=100)
@given(st.data())
def test_any_truncation_is_found(data):
    with tempfile.TemporaryDirectory() as folder:
        files, _, newer = written(folder)
        path = data.draw(st.sampled_from([newer, archive_of(files, newer)]), "file")
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
        check_fallback(files, newer)


def check_fallback(files, newer):
    position, number, damage = found(files)
    assert (position, number) == (OLDER, 1.0)
    assert len(damage) == 1
    assert damage[0].startswith(str(newer))


def test_something_added_or_moved_is_found(tmp_path):
    files, older, newer = written(tmp_path)
    newer.write_bytes(newer.read_bytes() + b" ")
    moved = older.rename(older.with_name("epoch-000007-batch-0000000000.backup"))
    with pytest.raises(DamagedBackupError, match="None of the backups in .* is intact") as damaged:
        found(files)
    assert f"{moved}: it is the manifest of epoch 1, after 3 batches, under another name" in str(damaged.value)
    assert f"{newer}: its checksum differs" in str(damaged.value)


def test_the_newest_are_kept_with_their_archives(tmp_path):
    files = BackupFiles(tmp_path, keep=3)
    paths = [write(files, Position(0, batch)) for batch in range(5)]
    assert files.paths() == paths[:1:-1]
    assert {*tmp_path.iterdir()} == {*paths[2:], *(archive_of(files, path) for path in paths[2:])}
    # Written again at a position, a backup takes the place of the one before.
    write(files, Position(0, 4), 7.0)
    assert found(files) == (Position(0, 4), 7.0, [])
    assert len([*tmp_path.iterdir()]) == 6


def test_damaged_ones_do_not_take_the_place_of_new_ones(tmp_path):
    files, _, newer = written(tmp_path)
    archive = archive_of(files, newer)
    os.truncate(archive, 100)
    files.set_aside(OLDER)
    files.keep = 1
    next_one = write(files, Position(0, 4))
    assert files.paths() == [next_one]
    # It may be mended: its archive stays, too.
    (aside,) = tmp_path.glob("*.damaged")
    assert archive.exists()
    # The second does not take the place of the first.
    os.truncate(archive_of(files, write(files, NEWER)), 100)
    files.set_aside(Position(0, 4))
    assert len([*tmp_path.glob("*.damaged")]) == 2
    assert aside.exists()
    files.remove_all()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("found", [True, False])
def test_a_directory_that_was_there_stays(tmp_path, found):
    directory = tmp_path if found else tmp_path / "new" / "backups"
    files = BackupFiles(directory)
    write(files, OLDER)
    files.remove_all()
    assert directory.exists() == found
    assert (directory if found else directory.parent).exists()


@pytest.mark.parametrize("content", [b"", b"mine\n", b'{"position": [9, 0]}\nmine', b"[" * 900 + b"\n", b"9" * 5000])
def test_what_is_not_ours_stays_as_it_is(content, tmp_path):
    names = [*NOT_OURS, archive_name(OLDER, "0" * 15), f"{archive_name(OLDER, '0' * 16)}.old"]
    for name in names:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "epoch-000008-batch-0000000000.backup").mkdir()
    (tmp_path / archive_name(OLDER, "0" * 16)).mkdir()
    elsewhere = write(BackupFiles(tmp_path / "other"), Position(7, 0))
    linked = tmp_path / elsewhere.name
    linked.symlink_to(elsewhere)
    (tmp_path / archive_name(OLDER, "1" * 16)).symlink_to(elsewhere)
    before = sorted(tmp_path.iterdir())
    files, _, newer = written(tmp_path, keep=1)
    os.truncate(archive_of(files, newer), 100)
    files.set_aside(Position(0, 2))
    written(tmp_path, keep=1)
    write(files, Position(2, 0))
    with pytest.raises(FileExistsError, match="already exists, and is not a backup. Move it away"):
        write(files, Position(9, 0))
    files.remove_all()
    assert sorted(tmp_path.iterdir()) == before
    assert {(tmp_path / name).read_bytes() for name in names} == {content}
    assert linked.is_symlink()
    assert elsewhere.exists()


def test_a_backup_of_another_format_is_not_called_damaged(tmp_path, monkeypatch):
    files, _, newer = written(tmp_path)
    monkeypatch.setattr(files_module, "FORMAT", 99)
    other = write(files, Position(3, 0))
    monkeypatch.undo()
    with pytest.raises(DamagedBackupError, match="another version of keras_paragrad wrote it, in format 99"):
        files.read(other)
    assert found(files)[0] == NEWER


def test_archives_of_a_manifest_that_cannot_be_read_stay(tmp_path):
    files, older, newer = written(tmp_path)
    archive = archive_of(files, newer)
    newer.write_bytes(newer.read_bytes()[:40])
    (tmp_path / archive_name(NEWER, "a" * 16)).write_bytes(b"")
    assert {*files.kept()} == {files.read(older).key, NEWER.stem}
    files.remove_archives(files.kept())
    assert archive.exists()


def test_a_full_disk_leaves_the_backups_as_they_were(tmp_path):
    files, older, newer = written(tmp_path)
    before = sorted(tmp_path.iterdir())
    with limited_files(2000), pytest.raises(OSError, match="File too large"):
        write(files, Position(2, 0), size=5000)
    assert sorted(tmp_path.iterdir()) == before
    assert found(files)[0] == NEWER


def test_two_trainings_in_one_directory_leave_no_backup_without_its_archive(tmp_path):
    files, _, newer = written(tmp_path)
    key = "b" * 16
    archive = files.write_archive(archive_name(Position(2, 0), key), [("kernel", np.ones(3))])
    write(BackupFiles(tmp_path), Position(1, 1))
    with pytest.raises(FileNotFoundError, match="another training backs up to"):
        files.commit(Position(2, 0), key, [archive])
    assert found(files)[0] == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("",), "Write directory='backups'"),
        ((3,), "Write directory='backups'"),
        (("gs://bucket/backups",), "on a local or mounted file system"),
        (("backups", 0), "keep=2"),
        (("backups", True), "keep=2"),
    ],
    ids=["empty", "number", "remote", "none-kept", "bool"],
)
def test_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        BackupFiles(*arguments)
