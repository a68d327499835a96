"""Private training of one worker among several."""

import keras
from privacy_oracle import cross_entropy, perceptron, some_data

from keras_paragrad import DistributedFit
from keras_paragrad.privacy import AdaptiveClip, make_private


def trained(dist, seed, *, secure=False):
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
        private.compile(keras.optimizers.SGD(0.2), cross_entropy(), metrics=["accuracy"], jit_compile=False)
    history = dist.fit(private, *some_data(), epochs=2, verbose=0).history
    return {"weights": model.get_weights(), "history": history, "updates": private.privacy.updates}


def work(_):
    """Trains with a seed, without one, and with the system's noise; called in a process of its own."""
    dist = DistributedFit("multi_worker")
    return {"seeded": trained(dist, 4), "unseeded": trained(dist, None), "secure": trained(dist, None, secure=True)}
