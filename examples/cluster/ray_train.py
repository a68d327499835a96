"""Handwritten digits, trained by two workers of a Ray cluster: `pip install 'keras_paragrad[ray,demo]'`, then run it.

The loop is an ordinary script: what it trains is what one device would, and so it runs without Ray too.
"""

import argparse
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """What each worker runs. Imports belong in here: Ray sends the function, and sets up the worker before it."""
    import keras
    from sklearn.datasets import load_digits

    from keras_paragrad import DistributedFit

    digits = load_digits()
    x, y = digits.data.astype("float32") / 16, digits.target
    keras.utils.set_random_seed(0)
    dist = DistributedFit()
    with dist.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    verbose = 2 if dist.is_chief else 0
    dist.fit(model, x, y, batch_size=64, epochs=config["epochs"], validation_split=0.2, seed=0, verbose=verbose)
    if dist.is_chief and config["weights"]:
        model.save_weights(config["weights"])


def main() -> None:
    """Starts the workers, or trains here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="0 trains in this process, without Ray")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--weights", help="a file for them, as in digits.weights.h5, which the first worker writes")
    parser.add_argument("--storage", help="where Ray keeps its results; a path that all machines share")
    parser.add_argument("--address", help="the Ray cluster's; without it, one is started on this machine")
    given = parser.parse_args()
    config = {"epochs": given.epochs, "weights": given.weights and str(Path(given.weights).absolute())}
    if not given.workers:
        train(config)
        return
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    ray.init(given.address, **({} if given.address else {"num_cpus": given.workers, "include_dashboard": False}))
    trainer = TensorflowTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=given.workers),
        run_config=RunConfig(storage_path=given.storage),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
