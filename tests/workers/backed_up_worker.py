"""One of two workers that train together; does what it is told, and writes down what it saw."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from runner import graphs
from trainings.backed_up import BATCH_SIZE, EPOCHS, build, data

from keras_paragrad import ExactAccumulation
from keras_paragrad.distribution import with_one_writer
from keras_paragrad.distribution.checkpoint import interruptions
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.files import DamagedBackupError
from keras_paragrad.distribution.checkpoint.interruptions import WorkerLostError, explained_failures
from keras_paragrad.distribution.cluster import find_cluster
from keras_paragrad.distribution.replicas.parallelism import ReplicaPreparation


class SignalAt(keras.callbacks.Callback):
    """Sends this process a signal after so many batches of this `fit`; says when each batch ended."""

    def __init__(self, number, batches):
        super().__init__()
        self.number, self.left, self.seen, self.when = number, batches, [], 0.0

    def on_train_batch_end(self, batch, logs=None):
        if not logs:
            return
        self.seen.append(batch)
        self.when = time.time()
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


class Worker:
    """What one worker is told, and where it writes what it saw."""

    def __init__(self, task: dict[str, Any]):
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
        )
        cluster = find_cluster(os.environ)
        assert cluster is not None
        self.task, self.cluster = task, cluster
        # Workers ask each other after every step.
        interruptions.SECONDS = 0.0

    def note(self, **found):
        with Path(self.task["report"]).open("a") as file:
            file.write(json.dumps(found) + "\n")

    def trained(self, name, callbacks):
        with self.strategy.scope():
            model = build()
        ReplicaPreparation(model)
        callbacks = with_one_writer([ExactAccumulation(), *callbacks], self.cluster.is_chief)
        try:
            with explained_failures(self.cluster):
                history = model.fit(
                    *data(), batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks
                )
        except (DamagedBackupError, ValueError) as error:
            if name == "refused":
                return str(error)
            raise
        weights = dict(zip(map(str, range(99)), model.get_weights(), strict=False))
        np.savez(f"{self.task['report']}.{name}.npz", **weights)
        self.note(history=history.history, updates=int(model.optimizer.iterations.numpy()))
        return None

    def backed_up(self):
        task = self.task
        watch = SignalAt(getattr(signal, task.get("signal", "SIGTERM")), task.get("after", -1))
        log = keras.callbacks.CSVLogger(task["log"], append=True)
        checkpoint = keras.callbacks.ModelCheckpoint(task["checkpoint"], save_weights_only=True)
        backup = Backup(task["directory"], every=3, callbacks=[checkpoint])
        try:
            self.trained("final", [watch, log, checkpoint, backup])
        except WorkerLostError as error:
            self.note(lost=str(error), seconds=time.time() - watch.when)
            raise
        finally:
            self.note(seen=watch.seen)


def main(task: dict[str, Any]) -> None:
    graphs.leave_unoptimized()
    worker = Worker(task)
    if task.get("undisturbed"):
        worker.trained("undisturbed", [])
    worker.note(refused=[worker.trained("refused", [Backup(*arguments)]) for arguments in task.get("refused", ())])
    worker.backed_up()
