"""One of two workers that train together; does what a JSON file says, and writes down what it saw."""

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import tensorflow as tf
from backed_up import BATCH_SIZE, EPOCHS, build, data

from keras_paragrad import ExactAccumulation
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.failures import WorkerLostError, explained_failures
from keras_paragrad.distribution.checkpoint.files import DamagedBackupError
from keras_paragrad.distribution.checkpoint.writers import with_one_writer
from keras_paragrad.distribution.cluster import find_cluster
from keras_paragrad.distribution.replicas import Preparation


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


def note(**found):
    with Path(task["report"]).open("a") as file:
        file.write(json.dumps(found) + "\n")


def trained(name, callbacks):
    with strategy.scope():
        model = build()
    Preparation(model)
    callbacks = with_one_writer([ExactAccumulation(), *callbacks], cluster.is_chief)
    try:
        with explained_failures(cluster):
            history = model.fit(
                *data(), batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks
            )
    except (DamagedBackupError, ValueError) as error:
        if name == "refused":
            return str(error)
        raise
    weights = dict(zip(map(str, range(99)), model.get_weights(), strict=False))
    np.savez(f"{task['report']}.{name}.npz", **weights)
    note(history=history.history, updates=int(model.optimizer.iterations.numpy()))
    return None


def backed_up():
    watch = SignalAt(getattr(signal, task.get("signal", "SIGTERM")), task.get("after", -1))
    log = keras.callbacks.CSVLogger(task["log"], append=True)
    checkpoint = keras.callbacks.ModelCheckpoint(task["checkpoint"], save_weights_only=True)
    backup = Backup(task["directory"], every=3, check_every=1, callbacks=[checkpoint])
    try:
        trained("final", [watch, log, checkpoint, backup])
    except WorkerLostError as error:
        note(lost=str(error), seconds=time.time() - watch.when)
        raise
    finally:
        note(seen=watch.seen)


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    communication = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=communication)
    )
    cluster = find_cluster(os.environ)
    assert cluster is not None
    if task.get("undisturbed"):
        trained("undisturbed", [])
    note(refused=[trained("refused", [Backup(*arguments)]) for arguments in task.get("refused", ())])
    backed_up()
