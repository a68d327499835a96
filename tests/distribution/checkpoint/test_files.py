"""Backups are found whole, or found damaged."""

import os
import tempfile

import hypothesis.strategies as st
import pytest
from backed_up import limited_files
from hypothesis import given, settings

from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Position

OLDER, NEWER = Position(0, 3), Position(1, 0)


def written(folder, content=b"the weights\nof a model", keep=2):
    files = BackupFiles(folder, keep)
    return files, files.write(OLDER, b"older" + content), files.write(NEWER, content)


@given(st.binary(max_size=200), st.integers(0, 10**6), st.integers(0, 10**9))
def test_what_was_written_is_read(content, epoch, batch):
    with tempfile.TemporaryDirectory() as folder:
        files = BackupFiles(folder)
        stored = files.read(files.write(Position(epoch, batch), content))
    assert (stored.content, stored.position) == (content, (epoch, batch))


@settings(max_examples=300)
@given(st.binary(max_size=60), st.data())
def test_any_flipped_bit_is_found(content, data):
    with tempfile.TemporaryDirectory() as folder:
        files, older, newer = written(folder, content)
        damaged = bytearray(newer.read_bytes())
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        newer.write_bytes(damaged)
        check_fallback(files, older, newer)


@settings(max_examples=100)
@given(st.binary(max_size=60), st.data())
def test_any_truncation_is_found(content, data):
    with tempfile.TemporaryDirectory() as folder:
        files, older, newer = written(folder, content)
        os.truncate(newer, data.draw(st.integers(0, newer.stat().st_size - 1)))
        check_fallback(files, older, newer)


def check_fallback(files, older, newer):
    with pytest.raises(DamagedBackupError):
        files.read(newer)
    stored, damage = files.newest()
    assert stored is not None
    assert stored.path == older
    assert len(damage) == 1
    assert damage[0].startswith(str(newer))


def test_something_added_or_moved_is_found(tmp_path):
    files, older, newer = written(tmp_path)
    newer.write_bytes(newer.read_bytes() + b"x")
    moved = older.rename(older.with_name("epoch-000007-batch-0000000000.backup"))
    stored, damage = files.newest()
    assert stored is None
    assert [line.split(":")[0] for line in damage] == [str(moved), str(newer)]
    assert "23 bytes of 22" in damage[1]


def test_the_newest_are_kept(tmp_path):
    files = BackupFiles(tmp_path, keep=3)
    paths = [files.write(Position(0, batch), b"") for batch in range(5)]
    assert files.paths() == paths[:1:-1]


def test_damaged_ones_do_not_take_the_place_of_new_ones(tmp_path):
    files, older, newer = written(tmp_path, keep=1)
    older = files.write(OLDER, b"")
    assert not older.exists()
    files, older, newer = written(tmp_path)
    newer.write_bytes(b"")
    files.set_aside(OLDER)
    files.keep = 1
    next_one = files.write(Position(0, 4), b"")
    assert files.paths() == [next_one]
    assert newer.with_name(f"{newer.name}.damaged").exists()
    files.remove_all()
    assert not tmp_path.exists()


def test_what_a_killed_writer_left_is_no_backup(tmp_path):
    files, _, newer = written(tmp_path)
    partial = newer.with_name("epoch-000009-batch-0000000000.backup.partial")
    partial.write_bytes(b"half")
    assert partial not in files.paths()
    files.write(Position(2, 0), b"")
    assert not partial.exists()


def test_a_full_disk_leaves_the_backups_as_they_were(tmp_path):
    files, older, newer = written(tmp_path)
    with limited_files(2000), pytest.raises(OSError, match="File too large"):
        files.write(Position(2, 0), bytes(5000))
    assert sorted(tmp_path.iterdir()) == [older, newer]
    assert files.newest()[0].path == newer


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("",), "Write the path of one"),
        ((3,), "Write the path of one"),
        (("gs://bucket/backups",), "Mount the bucket"),
        (("backups", 0), "1 or more"),
        (("backups", True), "1 or more"),
    ],
    ids=["empty", "number", "remote", "none-kept", "bool"],
)
def test_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        BackupFiles(*arguments)
