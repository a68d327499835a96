"""What an update adds to a weight is read off the graph where a single operation adds it, and nowhere else."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad.engine.telemetry.watch import WeightDeltas

ADDED = [
    lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    lambda: keras.optimizers.Adam(0.1, clipnorm=0.5),
    lambda: keras.optimizers.Lion(0.1),
]
CHANGED_OTHERWISE = {
    "weight decay": (lambda: keras.optimizers.AdamW(0.1), {}),
    "constraint": (lambda: keras.optimizers.SGD(0.1), {"constraint": "non_neg"}),
    "half precision": (lambda: keras.optimizers.SGD(0.1), {"dtype": "bfloat16"}),
    "assigned": (lambda: keras.optimizers.Ftrl(0.1), {}),
    "overwritten": (lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2), {}),
}


def updated(optimizer, weight, compiled=True):
    """Takes an update; what was read off, and by how much the weight changed."""
    optimizer.build([weight])
    known = []

    def update():
        additions = WeightDeltas([weight])
        optimizer.apply([tf.ones(weight.shape, weight.dtype)], [weight])
        (added,) = additions.read_off()
        known.append(added is not None)
        return tf.zeros([]) if added is None else added

    before = weight.numpy()
    added = (tf.function(update, autograph=False) if compiled else update)()
    return known[-1], added, weight.numpy() - before


@pytest.mark.parametrize("make_optimizer", ADDED)
def test_what_one_operation_adds(make_optimizer):
    known, added, change = updated(make_optimizer(), keras.Variable(np.linspace(1, 2, 6).reshape(2, 3)))
    assert known
    np.testing.assert_allclose(np.abs(added), np.abs(change), rtol=1e-5)


@pytest.mark.parametrize("way", CHANGED_OTHERWISE)
def test_what_is_changed_otherwise_is_not_read_off(way):
    make_optimizer, options = CHANGED_OTHERWISE[way]
    weight = keras.Variable(np.linspace(1, 2, 6), dtype=options.get("dtype"))
    weight.constraint = keras.constraints.get(options.get("constraint"))
    assert not updated(make_optimizer(), weight)[0]


def test_there_is_no_graph_to_read():
    assert not updated(keras.optimizers.SGD(0.1), keras.Variable(np.ones(3)), compiled=False)[0]
