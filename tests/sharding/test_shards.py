"""Updates in shards are those of whole variables: every optimizer, clip and average; and what a device holds."""

import itertools
import sys

import keras
import numpy as np
import pytest
from runner import covering, own_process
from trainings import sharded_training
from trainings.sharded_training import OPTIMIZERS, Case

from keras_paragrad import DistributedFit, recompute

# Rounding over four updates, in parts of the largest value.
CLOSE = 2e-6
# With oneDNN, TensorFlow keeps some of what is freed.
SYSTEM_ALLOCATOR = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
# Those that look at a whole variable, each in its way, and one that takes each weight by itself, as all others do.
KINDS = ("adam", "ftrl", "lamb", "adafactor", "muon", "trust_ratio")
# What an optimizer does with the gradient of a whole update.
APPLIED = [
    Case(*case)
    for case in itertools.product(
        OPTIMIZERS,
        ("optimizer", "parameters"),
        (
            (),
            ("clipnorm", "scale_factor"),
            ("global_clipnorm", "schedule"),
            ("clipvalue", "ema"),
            ("ema_overwrite", "weight_decay"),
        ),
    )
]


def check(cases, devices=2, overflows=(False,) * 4, workers=1):
    argument = {"devices": devices, "cases": [list(case) for case in cases], "overflows": list(overflows)}
    environments = own_process.environments_of_workers(workers) if workers > 1 else [{}]
    for of_worker in own_process.call(sharded_training.updates, argument, environments, 60 + 20 * len(cases)):
        for found in of_worker:
            assert found["in_shards"] == 4, found
            assert found["weights"] < CLOSE, found
            # Four gradients of about 1 that cancel to less than the clip of 0.01 are rounded as those of 1 are.
            assert found["slots"] < (5e-6 if workers > 1 and "clipvalue" in found["case"] else CLOSE), found
            assert found["scales"] == found["expected"], found
            assert found["moved"] == [not overflow for overflow in overflows], found


def test_every_kind_of_optimizer():
    cases = [case for case in APPLIED if case.optimizer in KINDS]
    check([cases[index] for index in sorted(covering.chosen(cases, 1))])


@pytest.mark.few(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_shards_are_in_memory_of_their_own(optimizer):
    """TensorFlow lets a variable that is assigned a slice keep all of the tensor that it was cut from."""
    (held,) = own_process.call(sharded_training.held_after_updates, optimizer, [SYSTEM_ALLOCATOR], seconds=120)
    # The matrix, two slots, and what else a process comes to hold meanwhile.
    # That is 0.24; shards that keep a whole tensor make it 0.73 or 1.23.
    assert held < 3 + 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_models_are_made_in_shards():
    """Four devices in one process take what one takes, and one variable at a time whole."""
    (most,) = own_process.call(sharded_training.most_while_building, None, [{}], seconds=120)
    # Of eighteen matrices in shards, three whole ones: the drawn one, and what its initializer computes with.
    assert most < 1 + 3 / 18


@pytest.mark.long
def test_every_optimizer_in_every_way():
    check(APPLIED)


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("prepared_first", [False, True])
def test_recomputed_loops_are_evaluated_in_shards(prepared_first):
    """A loop can't gather what it reads: not while it is recomputed, and not once that is undone."""
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], shard="parameters", min_shard_bytes=64)
    x, y = np.arange(96).reshape(16, 6) % 20, np.ones((16, 1))

    def made():
        model = keras.Sequential([keras.layers.Embedding(20, 8), keras.layers.GRU(8), keras.layers.Dense(1)])
        model.build((None, 6))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    with dist.scope():
        model = made()
    if prepared_first:
        dist.prepare(model)
    handle = recompute(model, layers=[layer.name for layer in model.layers])
    (during,) = dist.fit(model, x, y, batch_size=8, verbose=0, validation_data=(x, y)).history["val_loss"]
    handle.undo()
    plain = made()
    plain.set_weights(model.get_weights())
    expected = plain.evaluate(x, y, verbose=0)
    np.testing.assert_allclose([during, model.evaluate(x, y, verbose=0)], expected, rtol=1e-5)


def test_an_overflow_on_one_worker_is_an_update_on_none():
    """In the branch of a loss scale, workers gather what an optimizer needs whole, or none of them does."""
    case = Case("lamb", "parameters", ("ema_overwrite", "global_clipnorm", "loss_scale"))
    check([case], devices=1, overflows=[True, False, True, False], workers=2)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_every_optimizer_that_needs_whole_variables_under_a_loss_scale(devices):
    needing = ("lamb", "adafactor", "muon", "ftrl", "trust_ratio")
    cases = [each._replace(settings=(*each.settings, "loss_scale")) for each in APPLIED if each.optimizer in needing]
    check(cases, devices, [False, True, False, False, True, False], workers=2)
