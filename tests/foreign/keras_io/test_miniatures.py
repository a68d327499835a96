"""Each miniature of Keras's examples, by each component: plain Keras's steps on whole batches, or a refusal."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from foreign.keras_io import ways
from foreign.keras_io.expectations import TOLERANCE, expected
from foreign.keras_io.miniature import dense, normal
from foreign.keras_io.miniatures import MINIATURES
from runner import own_process

from keras_paragrad import AccumulatingOptimizer, recompute

# Keras's own, and ours of what is refused a moment later.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# What `make test` takes of all pairs.
QUICK = {
    ("captions", "slices"),
    ("clipping_step", "slices"),
    ("convnet", "accumulation"),
    ("graph_attention", "recomputation"),
    ("guide", "slices"),
    ("masked_tokens", "accumulation"),
    ("sharpness_aware", "replicas"),
    ("shuffled", "replicas"),
    ("spectral_normalization", "shards"),
    ("switch_transformer", "slices"),
    ("two_heads", "telemetry"),
    ("wgan_gp", "replicas"),
}


@functools.cache
def reference(name, **changed):
    return ways.plain(MINIATURES[name], changed)


def pairs(chosen):
    return [
        pytest.param(name, way, marks=() if (name, way) in QUICK else pytest.mark.long)
        for name in MINIATURES
        for way in chosen
    ]


def check(name, way):
    case, outcome = MINIATURES[name], expected(name, way)
    options = {**outcome.options, **({"changed": outcome.changed} if outcome.changed else {})}
    if outcome.refused is not None:
        with pytest.raises(ValueError, match=outcome.refused):
            ways.WAYS[way](case, **options)
        return
    if outcome.warned is not None:
        with pytest.warns(UserWarning, match=outcome.warned):
            # Pytest raises it again outside of the module for which pyproject.toml ignores it.
            warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
            ways.WAYS[way](case, **options)
        return
    weights, shown = ways.errors(ways.WAYS[way](case, **options), reference(name, **outcome.changed))
    assert weights < TOLERANCE
    assert shown < TOLERANCE or not outcome.logs


@pytest.mark.parametrize(("name", "way"), pairs(["accumulation", "slices", "recomputation", "telemetry"]))
def test_one_device(name, way):
    check(name, way)


@pytest.mark.own_process(seconds=600)
@pytest.mark.parametrize(("name", "way"), pairs(["replicas", "shards"]))
def test_two_devices(name, way):
    check(name, way)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["batch_normalization", "normalizing_step", "queue", "shuffled", "wgan_gp"])
def test_two_workers(name):
    """Statistics are all-reduced in the backward pass, after gathers that its graph came to have later."""
    changed = expected(name, "shards").changed
    for found in own_process.on_workers(ways.on_a_worker, (name, dict(changed)), seconds=300):
        assert max(found) < TOLERANCE


def actor_critic(model, optimizer, rows, parts):
    """As rl/actor_critic_cartpole: what was played is lost and won, and then learned from."""
    for part in np.split(rows, parts):
        with tf.GradientTape() as tape:
            acted, judged = keras.ops.split(model(part), [2], axis=1)
            won = keras.ops.sum(part, axis=1, keepdims=True) - judged
            chosen = keras.ops.log_softmax(acted)[:, :1]
            loss = keras.ops.mean(keras.ops.square(won) - chosen * keras.ops.stop_gradient(won))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def reptile(model, optimizer, rows, parts):
    """As vision/reptile: steps on a few rows, and then a part of the way that they have led."""
    before = model.get_weights()
    for part in np.split(rows, parts):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(part)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    ways = zip(before, model.get_weights(), strict=True)
    model.set_weights([old + 0.25 * (new - old) for old, new in ways])


@pytest.mark.parametrize("loop", [actor_critic, reptile])
def test_loops_by_hand(loop):
    """Even micro-batches accumulate, and layers run again, as there is no `fit` to tell what is uneven."""

    def train(optimizer, parts, again=False):
        keras.utils.set_random_seed(0)
        model = dense(6, 3, inputs=5)
        if again:
            recompute(model, every=1)
        for _ in range(2):
            loop(model, optimizer, normal(5)[:16], parts)
        return model.get_weights()

    def sgd():
        return keras.optimizers.SGD(0.05, momentum=0.9)

    whole = train(sgd(), 1)
    parts = train(AccumulatingOptimizer(sgd(), 4, weighting="uniform"), 4)
    for one, other, again in zip(parts, whole, train(sgd(), 1, again=True), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
        np.testing.assert_allclose(again, other, atol=1e-6)
