"""Trains a digit classifier on every process that it is started in, with the weights that one process ends with.

`python examples/digits_on_workers.py` trains in one process; for two,

    python -m keras_paragrad launch --workers 2 examples/digits_on_workers.py
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_paragrad import DistributedFit


def main():
    """Trains, and prints what can be compared."""
    # Waits for the other workers; must come before TensorFlow does anything else.
    dist = DistributedFit()
    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target
    with dist.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((64,)), keras.layers.Dense(64, activation="silu"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        model.compile(
            keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    # 1797 images in batches of 100: the last batch of an epoch has 97, and two workers take 49 and 48 of them.
    history = dist.fit(model, images, labels, batch_size=100, epochs=5, verbose=0).history
    total = sum(float(np.abs(weight).sum()) for weight in model.get_weights())
    accuracy, replicas = history["accuracy"][-1], dist.plan.replicas.value
    print(f"replicas: {replicas}, accuracy: {accuracy:.4f}, sum of absolute weights: {total:.3f}")


if __name__ == "__main__":
    main()
