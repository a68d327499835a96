"""One process of a cluster with parameter servers: the chief trains for so many epochs, the others serve."""

import os
import sys

import keras
import numpy as np

from keras_paragrad import DistributedFit
from keras_paragrad.distribution import servers
from keras_paragrad.distribution.cluster import find_cluster

ROWS, BATCH, WIDTH = 1600, 16, 300


class Report(keras.callbacks.Callback):
    """Prints what was counted, and where training is."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print("running", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        count = int(self.model.metrics[0].count.numpy())
        print(f"epoch {epoch} updates {int(self.model.optimizer.iterations)} examples {count}", flush=True)


def main(epochs: int) -> None:
    cluster = find_cluster(os.environ)
    if cluster.job in ("worker", "ps"):
        servers.serve(cluster)
    strategy = servers.make_parameter_server_strategy(cluster)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = keras.layers.Dense(256, activation="relu")
        model = keras.Sequential([keras.Input((WIDTH,)), hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-2), "mse")
    DistributedFit(strategy, exact=False).prepare(model)
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    losses = model.fit(x, x[:, :1], BATCH, epochs=epochs, verbose=0, callbacks=[Report()]).history["loss"]
    print("falls", losses[-1] < losses[0], flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
