"""Private training on replicas: the updates of one device, with one draw of noise for all."""

import itertools

import keras
import numpy as np
import pytest
from oracles.private_updates import cross_entropy, draws_of, perceptron, some_data
from runner import own_process
from workers import private_worker

from keras_paragrad import DistributedFit
from keras_paragrad.distribution import Pipeline
from keras_paragrad.privacy import AdaptiveClip, make_private


def trained(dist, clip_norm, jit, *, seed=19, run_eagerly=False):
    """Three updates; workers take six, below."""
    x, y = some_data(48)
    with dist.scope():
        model = perceptron("l2")
        private = make_private(
            *(model,),
            clip_norm=clip_norm,
            noise_multiplier=0.5,
            expected_batch_size=16,
            delta=1e-3,
            seed=seed,
            physical_batch_size=16,
        )
        # Without metrics, XLA compiles all physical batches in one call.
        metrics = None if isinstance(clip_norm, dict) else ["accuracy"]
        options = {"metrics": metrics, "jit_compile": jit, "run_eagerly": run_eagerly}
        private.compile(keras.optimizers.SGD(0.2, momentum=0.9), cross_entropy(), **options)
    history = dist.fit(private, x, y, verbose=0)
    return private, model.get_weights(), history.history


@pytest.mark.own_process(seconds=200)
@pytest.mark.few(0, "None-False-0.3")
@pytest.mark.parametrize(
    "clip_norm",
    # Workers have the last, below.
    [0.3, {"hidden": 0.2, "out": 0.1}, pytest.param(AdaptiveClip(initial=0.3), marks=pytest.mark.long)],
)
@pytest.mark.parametrize("jit", [False, True])
# With the parameters, the optimizer's variables are in shards, too.
@pytest.mark.parametrize("shard", [None, "parameters", pytest.param("optimizer", marks=pytest.mark.long)])
def test_replicas_take_the_updates_of_one_device(shard, jit, clip_norm):
    two = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"], shard=shard, min_shard_bytes=1)
    # Of an odd number, replicas have unequal shares: of 17 rows 9 and 8, which are two physical batches and one. What
    # is drawn depends on the optimizer's configuration too, which differs between releases of Keras.
    for seed in itertools.count(19):
        # Tracing takes longer than the updates.
        plain, expected, shown = trained(DistributedFit("none"), clip_norm, jit=False, seed=seed, run_eagerly=True)
        if any(len(draw) % 2 and len(draw) > 16 for draw in draws_of(plain, plain.privacy.updates)):
            break
    _, found, history = trained(two, clip_norm, jit, seed=seed)
    largest = max(np.abs(each).max() for each in expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6 * largest, rtol=0)
    assert history.keys() == shown.keys() >= {"loss", "epsilon"}
    for name, values in shown.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


@pytest.mark.own_process(seconds=120)
def test_the_systems_noise_is_one_draw():
    """Replicas that added noise of their own would drift apart, or add the wrong amount."""
    x, y = some_data()
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1000, use_bias=False)])
        private = make_private(
            model, clip_norm=1e-6, noise_multiplier=2.0, expected_batch_size=10, delta=1e-3, secure_noise=True
        )
        private.compile(keras.optimizers.SGD(10 / 2e-6), "mse")
        before = model.get_weights()[0]
    # Weights of 0, so that nothing but noise moves the model.
    dist.fit(private, x, np.zeros((len(x), 1000), "float32"), sample_weight=np.zeros(len(x)), verbose=0)
    for copy in model.trainable_weights[0].value.values:
        moved = copy.numpy() - before
        # Six updates of standard normal noise.
        assert abs(moved.std() / 6**0.5 - 1) < 0.05
        np.testing.assert_array_equal(copy.numpy(), model.get_weights()[0])


@pytest.fixture(scope="module")
def workers():
    return own_process.on_workers(private_worker.work, ["seeded", "unseeded"], seconds=150)


def test_workers_take_the_updates_of_one_device(workers):
    expected = private_worker.trained(DistributedFit("none"), 4, run_eagerly=True)
    largest = max(np.abs(each).max() for each in expected["weights"])
    for worker in workers:
        found = worker["seeded"]
        assert found["updates"] == expected["updates"] == 6
        for one, other in zip(found["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6 * largest, rtol=0)
        for name in ("loss", "accuracy", "epsilon"):
            np.testing.assert_allclose(found["history"][name], expected["history"][name], rtol=1e-5)


@pytest.mark.long
def test_workers_agree_on_the_systems_noise():
    check_agreement(own_process.on_workers(private_worker.work, ["secure"], seconds=150), "secure")


@pytest.mark.long
def test_workers_agree_on_samples_and_noise(workers):
    check_agreement(workers, "unseeded")


def check_agreement(workers, noise):
    first, second = (worker[noise]["weights"] for worker in workers)
    another = private_worker.without_a_seed(DistributedFit("none"), secure=noise == "secure")["weights"]
    for one, other, elsewhere in zip(first, second, another, strict=True):
        np.testing.assert_array_equal(one, other)
        # From one device, they would otherwise differ by rounding.
        assert np.abs(one - elsewhere).max() > 1e-3


@pytest.mark.own_process(seconds=120)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": {"batch": 2}, "layout": "auto"}, "has PerExampleGradients, whose rules have not been verified"),
        ({"strategy": Pipeline(2, microbatches=2)}, "is a PrivateModel that overrides call"),
    ],
)
def test_meshes_and_pipelines_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        trained(DistributedFit(**arguments), 0.3, jit=False)
