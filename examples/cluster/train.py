"""Handwritten digits on every process of a cluster, going on from the last backup when it is started again.

`keras-paragrad launch train.py` in each task of a Slurm or Kubernetes job, as slurm.sbatch and kubernetes.yaml do;
`keras-paragrad launch --workers 2 train.py` on one machine; or `python train.py` for one process. It takes
`pip install 'keras_paragrad[demo]'`.
"""

import argparse

import keras
from sklearn.datasets import load_digits

from keras_paragrad import DistributedFit


def main() -> None:
    """Trains until the last epoch, over as many starts as that takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backups", default="backups", help="a directory that outlives the job (default: backups)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--weights", help="a file for them, as in digits.weights.h5, which the first worker writes")
    given = parser.parse_args()

    # Waits for the other workers; must come before TensorFlow does anything else.
    dist = DistributedFit()
    # The same on all of them: the weights to begin with, and the order of the rows.
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = digits.data.astype("float32") / 16, digits.target
    with dist.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    # SIGTERM, which schedulers send before they end a job, backs up after the batch and leaves with status 143.
    history = dist.fit(
        model,
        x,
        y,
        batch_size=64,
        epochs=given.epochs,
        validation_split=0.2,
        verbose=2,
        callbacks=dist.callbacks(given.backups, every=10),
    )
    if dist.is_chief:
        if given.weights:
            model.save_weights(given.weights)
        print("val_accuracy:", f"{history.history['val_accuracy'][-1]:.4f}")


if __name__ == "__main__":
    main()
