"""Backups of shards: written by every worker, whole after any kill, and restored on other replicas."""

import functools
import itertools
import shutil

import numpy as np
import pytest
from runner import own_process
from trainings import backed_up_shards
from trainings.backed_up_shards import STEPS

from keras_paragrad.distribution.checkpoint.files import BackupFiles

SECONDS = 120
# Rounding of 20 updates by replicas that reduce in another order, to weights of about 1.
CLOSE = 2e-6


def gone_on(directory, devices, *ways, workers=1, **killed):
    """Goes on with a training on each of several devices in turn, until a batch."""
    argument = {"directory": directory and str(directory), "devices": devices, "ways": ways, **killed}
    environments = own_process.environments_of_workers(workers) if workers > 1 else [{}]
    found = own_process.call(backed_up_shards.gone_on_with, argument, environments, SECONDS)
    return [[np.array(each) for each in itertools.chain(*of_worker)] for of_worker in found]


@functools.cache
def undisturbed():
    """What one device ends with that is never broken off."""
    return gone_on(None, 1, (1, None, STEPS + 1))[0]


def check_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=CLOSE * max(1.0, np.abs(other).max()))


# In `make test` two replicas: each of them is traced.
@pytest.mark.parametrize("most", [2, pytest.param(4, marks=pytest.mark.long)])
def test_from_replicas_to_fewer_to_one_to_workers_and_back(tmp_path, most):
    # In the middle of a window each time.
    fewer = [(2, "parameters", 9)] if most == 4 else []
    gone_on(tmp_path, most, (most, "parameters", 5), *fewer, (1, None, 12))
    gone_on(tmp_path, 1, (1, "parameters", 15), workers=2)
    files = BackupFiles(tmp_path)
    ends = [archive.name[-len("-00000-of-00002.npz") :] for archive in files.read(files.paths()[0]).archives]
    assert ends[1:] == ["-00000-of-00002.npz", "-00001-of-00002.npz"]
    ended = gone_on(tmp_path, 2, (2, "optimizer", STEPS + 1))[0]
    # The optimizer's variables: the window's gradients are those of all replicas.
    check_equal(ended, undisturbed())
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_workers_with_disks_of_their_own(tmp_path):
    # Workers that are started again are in test_gang.py: here they go on in the same processes.
    gone_on(tmp_path / "{worker}", 1, (1, "parameters", 5), (1, "parameters", 9), workers=2)
    files = BackupFiles(tmp_path / "0")
    assert len(files.paths()) == 2
    for path in files.paths():
        *chief, other = (archive.name for archive in files.read(path).archives)
        assert all((tmp_path / "0" / name).exists() for name in chief)
        assert not (tmp_path / "0" / other).exists()
        assert (tmp_path / "1" / other).exists()
    # Copied to one directory, they are restored on one device, and without one of them on none.
    for path in list((tmp_path / "1").iterdir()):
        shutil.move(path, tmp_path / "0")
    ended = gone_on(tmp_path / "0", 2, (1, None, STEPS + 1))[0]
    check_equal(ended, undisturbed())


def test_missing_and_damaged_shards_are_named(tmp_path):
    argument = {"directory": str(tmp_path)}
    (told,) = own_process.call(backed_up_shards.damaged_backups, argument, [{}], SECONDS)
    assert (told["saved on a full disk"], told["unchanged"]) == (False, True)
    position, damage, name = told["without the newest"]
    assert position == (0, 2)
    assert len(damage) == 1
    assert f"{name}: it is missing, or has another size" in damage[0]
    error, older = told["without both"]
    assert f"{older}: its checksum differs" in error
    assert "it is missing, or has another size" in error
    assert told["with the newest again"] == [(0, 3), []]
    assert told["saved"] and told["kept"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("worker", "operations"), [(0, 1), (0, 20), (0, 56), (0, 58), (0, 59), (0, 61), (1, 1), (1, 20), (1, 56)]
)
def test_a_worker_killed_while_it_writes(worker, operations, tmp_path):
    with pytest.raises(RuntimeError):
        gone_on(tmp_path, 1, (1, "parameters", 8), workers=2, killed=worker, operations=operations)
    ended = gone_on(tmp_path, 1, (1, "parameters", STEPS + 1), workers=2)[0]
    check_equal(ended, undisturbed())


@pytest.mark.few(0, "parameters")
@pytest.mark.parametrize("shard", ["parameters", None, pytest.param("optimizer", marks=pytest.mark.long)])
def test_killed_while_writing(shard):
    (told,) = own_process.call(backed_up_shards.killed_while_writing, {"shard": shard, "most": 200}, [{}], SECONDS)
    *killed, last = told["found"]
    assert len(killed) > 20
    good = 0.0
    for status, operations, epoch, batch, values, damage in killed:
        assert (status, damage, epoch) == (-9, [], 1 if values[0] else 0)
        (value,) = values
        # The backup from before, or that which was being written.
        assert value in (good, operations)
        assert batch == operations // 2 if value == operations else True
        good = value
    status, operations, epoch, batch, values, damage = last
    assert (status, damage, values, (epoch, batch)) == (0, [], [operations], (1, operations // 2))
    # Nothing that a killed process left is there any longer: two backups, of an archive or two.
    assert len(told["left"]) == (6 if shard else 4)


@pytest.mark.few(0, "writes nothing-None-False", "has no disk-parameters-False")
@pytest.mark.parametrize(
    ("defect", "shard", "saved"),
    [
        ("finishes late", "parameters", True),
        ("writes late", "parameters", True),
        ("has no disk", "parameters", False),
        ("lists nothing", "parameters", False),
        ("writes nothing", "parameters", False),
        ("writes nothing", None, False),
        ("commits late", None, True),
    ],
)
def test_one_worker_is_late_or_its_disk_fails(defect, shard, saved, tmp_path):
    """No worker waits for what doesn't come, and all leave together: once the backup is there, or isn't to be."""
    argument = {"defect": defect, "shard": shard, "directory": str(tmp_path), "every": 2}
    found = own_process.call(
        backed_up_shards.stopped_with_a_defect, argument, own_process.environments_of_workers(2), 40
    )
    assert [each[0] for each in found] == [saved] * 2
    assert [each[1] for each in found] == [saved] * 2
