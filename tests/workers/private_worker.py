"""Private training of one worker among several."""

import keras
from oracles.private_updates import cross_entropy, perceptron, some_data

from keras_paragrad import DistributedFit
from keras_paragrad.privacy import AdaptiveClip, make_private


def trained(dist, seed, *, secure=False, run_eagerly=False, examples=30, epochs=2):
    """The weights and history of some updates."""
    with dist.scope():
        model = perceptron("l2")
        private = make_private(
            *(model,),
            clip_norm=AdaptiveClip(initial=0.3),
            noise_multiplier=0.5,
            expected_batch_size=10,
            delta=1e-3,
            seed=seed,
            physical_batch_size=8,
            secure_noise=secure,
        )
        options = {"metrics": ["accuracy"], "jit_compile": False, "run_eagerly": run_eagerly}
        private.compile(keras.optimizers.SGD(0.2), cross_entropy(), **options)
    history = dist.fit(private, *some_data(examples), epochs=epochs, verbose=0).history
    return {"weights": model.get_weights(), "history": history, "updates": private.privacy.updates}


def without_a_seed(dist, secure):
    """Two updates, which take less time than tracing would."""
    return trained(dist, None, secure=secure, run_eagerly=True, examples=20, epochs=1)


def work(noises):
    """Trains with each noise: with a seed, without one, or with the system's; called in a process of its own."""
    dist = DistributedFit("multi_worker")
    return {
        noise: trained(dist, 4) if noise == "seeded" else without_a_seed(dist, secure=noise == "secure")
        for noise in noises
    }
