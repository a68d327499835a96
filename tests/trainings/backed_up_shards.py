"""Training in shards that is broken off, killed while it writes, and gone on with elsewhere."""

import contextlib
import gc
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from trainings.backed_up import limited_files

from keras_paragrad import AccumulatingOptimizer, DistributedFit
from keras_paragrad.distribution import Backup
from keras_paragrad.distribution.checkpoint import interruptions
from keras_paragrad.distribution.checkpoint.content import VariableInShards
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Position
from keras_paragrad.distribution.checkpoint.interruptions import TrainingInterrupted
from keras_paragrad.distribution.checkpoint.resuming import common_backup
from keras_paragrad.distribution.checkpoint.writing import BackupWriter

ROWS, BATCH = 80, 4
STEPS = ROWS // BATCH


class StopAfter(keras.callbacks.Callback):
    """Breaks off after a batch of the epoch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.batch:
            raise KeyboardInterrupt


class KillWhileSaving(keras.callbacks.Callback):
    """Has this worker killed at an operation on files, of those after a batch."""

    def __init__(self, batch, operations):
        super().__init__()
        self.batch, self.operations = batch, operations

    def on_train_batch_begin(self, batch, logs=None):
        if batch + 1 == self.batch:
            kill_at(self.operations)


def data():
    draw = np.random.default_rng(0)
    return draw.normal(size=(ROWS, 12)).astype("float32"), draw.normal(size=(ROWS, 1)).astype("float32")


def build(run_eagerly=False):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12,))
    hidden = keras.layers.Dense(17, "tanh")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(24, "tanh")(hidden)))
    adam = keras.optimizers.Adam(0.01, use_ema=True, global_clipnorm=0.5)
    optimizer = AccumulatingOptimizer(adam, 3, tail="carry")
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False, run_eagerly=run_eagerly)
    return model


def use_devices(count):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )


_cluster: list[tf.distribute.Strategy] = []


def distributed(devices: int, shard: str | None) -> DistributedFit:
    """On so many devices of this process; of none, on this process's worker of a cluster."""
    if "TF_CONFIG" in os.environ:
        # A process joins its cluster once.
        dist = DistributedFit(_cluster[0] if _cluster else "multi_worker", shard=shard, min_shard_bytes=64)
        _cluster[:] = [dist.strategy]
        return dist
    if devices == 1:
        return DistributedFit("none")
    names = [f"CPU:{index}" for index in range(devices)]
    return DistributedFit("mirrored", names, shard=shard, min_shard_bytes=64)


def gone_on_with(argument: dict[str, Any]) -> list[Any]:
    """Goes on with a training, in each of several ways until a batch; called in a process of its own."""
    use_devices(argument["devices"])
    model: Any = None
    for devices, shard, until in argument["ways"]:
        dist = distributed(devices, shard)
        with dist.scope():
            # On one device twenty steps take less than tracing them.
            model = build(run_eagerly=devices == 1 and "TF_CONFIG" not in os.environ)
        callbacks: list[Any] = []
        if argument["directory"]:
            worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
            callbacks.append(Backup(argument["directory"].format(worker=worker), every=1))
            if argument.get("killed") == worker:
                callbacks.append(KillWhileSaving(until - 2, argument["operations"]))
        with contextlib.suppress(KeyboardInterrupt):
            dist.fit(
                model,
                *data(),
                batch_size=BATCH,
                shuffle=False,
                verbose=0,
                callbacks=[*callbacks, StopAfter(until)],
            )
    optimizer = [variable.numpy().tolist() for variable in model.optimizer.variables]
    return [[weight.tolist() for weight in model.get_weights()], optimizer]


def damaged_backups(argument: dict[str, Any]) -> dict[str, Any]:
    """What is found of backups as their shards are removed, changed, or can't be written."""
    use_devices(2)
    dist, told = distributed(2, "parameters"), {}
    with dist.scope():
        model = build()
    backup = Backup(argument["directory"], every=1)
    with contextlib.suppress(KeyboardInterrupt):
        dist.fit(model, *data(), batch_size=BATCH, verbose=0, callbacks=[backup, StopAfter(4)])
    files = BackupFiles(argument["directory"])
    older, newer = (next(files.directory.glob(f"*-batch-000000000{batch}-*-of-*")) for batch in (2, 3))
    before = sorted(path.name for path in files.directory.iterdir())
    with limited_files(4000):
        backup._position = Position(0, 4)
        told["saved on a full disk"] = backup.save()
    told["unchanged"] = before == sorted(path.name for path in files.directory.iterdir())
    newer.rename(newer.with_suffix(".moved"))
    stored, damage = common_backup(dist.strategy, files)
    told["without the newest"] = [stored and stored.position, damage, newer.name]
    content = bytearray(older.read_bytes())
    content[-1] ^= 1
    older.write_bytes(content)
    try:
        common_backup(dist.strategy, files)
    except DamagedBackupError as error:
        told["without both"] = [str(error), older.name]
    newer.with_suffix(".moved").rename(newer)
    stored, damage = common_backup(dist.strategy, files)
    told["with the newest again"] = [stored and stored.position, damage]
    # A damaged backup's shards are kept beside it, as it may be mended.
    files.set_aside(Position(0, 2))
    backup._position = Position(0, 5)
    told["saved"] = backup.save()
    told["kept"] = newer.exists()
    return told


def killed_while_writing(argument: dict[str, Any]) -> dict[str, Any]:
    """Saves in a child that is killed at its first file operation, at its second, and so on."""
    use_devices(2)
    dist = distributed(2, argument["shard"])
    with dist.scope():
        model = build()
    with tempfile.TemporaryDirectory() as directory:
        backup = Backup(directory, every=1)
        with contextlib.suppress(KeyboardInterrupt):
            dist.fit(model, *data(), batch_size=BATCH, verbose=0, callbacks=[backup, StopAfter(3)])
        fill(model, 0.0)
        backup.save()
        files, found = BackupFiles(directory), []
        for operations in range(1, argument["most"]):
            fill(model, operations)
            # The same position is written twice: training was resumed from an older backup.
            backup._position = Position(1, operations // 2)
            child = os.fork()
            if child == 0:
                # A fork has none of TensorFlow's threads. Variables are read without them, but graphs aren't freed.
                gc.disable()
                kill_at(operations)
                os._exit(0 if backup.save() else 3)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            stored, damage = common_backup(dist.strategy, files)
            kept = stored.position if stored else None
            found.append([status, operations, *(kept or ()), restored(stored), damage])
            if status == 0:
                break
        return {"found": found, "left": sorted(path.name for path in Path(directory).iterdir())}


def fill(model: keras.Model, number: float) -> None:
    for variable in model.trainable_variables:
        variable.assign(tf.fill(variable.shape, float(number)))


def restored(stored: Any) -> list[float]:
    """All values of the model's weights in a backup."""
    content = stored.content
    values = [
        stored.reader.read(value) if isinstance(value, VariableInShards) else value
        for name, value in zip(content.names["model"], content.values["model"], strict=True)
        if not name.startswith("seed")
    ]
    return sorted({float(number) for value in values for number in np.ravel(value)})


def kill_at(operations: int) -> None:
    """Has this process killed at an operation on files: at an array, a flush to disk, a renaming or a removal."""
    left = [operations]

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return run

    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    np.lib.format.write_array = counted(np.lib.format.write_array)


def _end_of(files: type[BackupFiles], defect: str) -> None:
    """Has this worker be late, or its disk fail, where the other one depends on it."""
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    finish, write, commit = BackupWriter.finish, files.write_archive, files.commit

    def finish_late(writer: BackupWriter) -> None:
        time.sleep(0.7)
        finish(writer)

    def fail(*_: Any) -> Any:
        raise OSError("the disk is gone")

    def write_late(*words: Any) -> Any:
        time.sleep(2)
        return write(*words)

    def commit_late(*words: Any) -> Path:
        time.sleep(2)
        return commit(*words)

    if defect == "finishes late" and worker == 1:
        BackupWriter.finish = finish_late
    elif defect == "writes nothing" and worker == 0:
        files.commit = fail
    elif defect == "has no disk" and worker == 1:
        files.write_archive = fail
    elif defect == "lists nothing" and worker == 0:
        files.kept = fail
    elif defect == "writes late" and worker == 1:
        files.write_archive = write_late
    elif defect == "commits late" and worker == 0:
        files.commit = commit_late


class Sigterm(keras.callbacks.Callback):
    """A notice to the first worker after a batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == 4 and '"index": 0' in os.environ["TF_CONFIG"]:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_with_a_defect(argument: dict[str, Any]) -> list[Any]:
    """Trains as one of two workers until SIGTERM; whether it was saved, and the backups that are there then."""
    use_devices(1)
    _end_of(BackupFiles, argument["defect"])
    # Workers ask each other after every step.
    interruptions.SECONDS = 0.0
    dist = distributed(0, argument["shard"])
    with dist.scope():
        model = build()
    callbacks = [Sigterm(), Backup(argument["directory"], every=argument["every"])]
    try:
        dist.fit(model, *data(), batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    except TrainingInterrupted as stopped:
        return [stopped.saved, (Path(argument["directory"]) / "epoch-000000-batch-0000000004.backup").exists()]
    return []
