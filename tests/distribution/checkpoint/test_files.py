"""Backups are found whole, or found damaged."""

import os
import tempfile

import hypothesis.strategies as st
import pytest
from hypothesis import given
from runner.covering import examples
from trainings.backed_up import NOT_OURS, limited_files

from keras_paragrad.distribution.checkpoint import file_format
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Position

pytestmark = pytest.mark.fast

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


@pytest.mark.not_fast
@examples(100, of=300)
@given(st.binary(max_size=60), st.data())
def test_any_flipped_bit_is_found(content, data):
    with tempfile.TemporaryDirectory() as folder:
        files, older, newer = written(folder, content)
        damaged = bytearray(newer.read_bytes())
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        newer.write_bytes(damaged)
        check_fallback(files, older, newer)


@examples(40, of=100)
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
    os.truncate(newer, newer.stat().st_size - 1)
    files.set_aside(OLDER)
    files.keep = 1
    next_one = files.write(Position(0, 4), b"")
    assert files.paths() == [next_one]
    aside = newer.with_name(f"{newer.name}.damaged")
    assert aside.exists()
    # The second does not take the place of the first.
    os.truncate(files.write(NEWER, b"again"), 126)
    files.set_aside(OLDER)
    assert sorted(tmp_path.iterdir()) == [aside, aside.with_name(f"{aside.name}-2")]
    files.remove_all()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("found", [True, False])
def test_a_directory_that_was_there_stays(tmp_path, found):
    directory = tmp_path if found else tmp_path / "new" / "backups"
    files = BackupFiles(directory)
    files.write(OLDER, b"")
    files.remove_all()
    assert directory.exists() == found
    assert (directory if found else directory.parent).exists()


@pytest.mark.parametrize("content", [b"", b"mine\n", b'{"position": [9, 0]}\nmine', b"[" * 900 + b"\n", b"9" * 5000])
def test_what_is_not_ours_stays_as_it_is(content, tmp_path):
    for name in NOT_OURS:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "epoch-000008-batch-0000000000.backup").mkdir()
    elsewhere = BackupFiles(tmp_path / "other").write(Position(7, 0), b"linked")
    linked = tmp_path / elsewhere.name
    linked.symlink_to(elsewhere)
    before = sorted(tmp_path.iterdir())
    files, _, newer = written(tmp_path, keep=1)
    os.truncate(newer, newer.stat().st_size - 1)
    files.set_aside(Position(0, 2))
    written(tmp_path, keep=1)
    files.write(Position(2, 0), b"")
    with pytest.raises(FileExistsError, match="already exists, and is not a backup. Move it away"):
        files.write(Position(9, 0), b"")
    files.remove_all()
    assert sorted(tmp_path.iterdir()) == before
    assert {(tmp_path / name).read_bytes() for name in NOT_OURS} == {content}
    assert linked.is_symlink()
    assert elsewhere.exists()


def test_a_backup_under_another_name_is_not_ours_any_more(tmp_path):
    files, older, newer = written(tmp_path)
    kept = [
        path.rename(tmp_path / name)
        for path, name in ((older, "mine.backup"), (newer, "epoch-000003-batch-0000000000.backup"))
    ]
    files.remove_all()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_backup_of_another_format_is_not_called_damaged(tmp_path, monkeypatch):
    files, older, newer = written(tmp_path)
    monkeypatch.setattr(file_format, "FORMAT", 99)
    other = files.write(Position(3, 0), b"of the future")
    with pytest.raises(DamagedBackupError, match="another version of keras_paragrad wrote it, in format 99"):
        files.read(other)
    assert files.newest()[0].path == newer


def test_what_a_killed_writer_left_is_no_backup(tmp_path):
    files, _, newer = written(tmp_path)
    partial = newer.with_name("epoch-000009-batch-0000000000.backup.partial")
    partial.write_bytes(file_format.make_manifest(Position(9, 0), b"the whole") + b"half")
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
