"""Training in shards ends where one device ends: every optimizer, clip and way to cut a batch."""

import itertools
import sys

import keras
import numpy as np
import pytest
from runner import covering, own_process
from trainings import scaled_training, sharded_training
from trainings.sharded_training import MODELS, OPTIMIZERS, Case

from keras_paragrad import DistributedFit, recompute

# Rounding of the largest weight over six updates; scaled to the largest weight.
CLOSE = 2e-6
# With oneDNN, TensorFlow keeps some of what is freed.
SYSTEM_ALLOCATOR = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
OPTIONS = (
    (),
    ("clipnorm", "scale_factor"),
    ("global_clipnorm", "accumulate", "scale_factor"),
    ("clipvalue", "slices"),
    ("ema", "jit"),
    ("ema_overwrite", "accumulate"),
    ("weight_decay", "schedule", "slices"),
    ("global_clipnorm", "loss_scale"),
    ("loss_scale", "accumulate", "clipnorm"),
    ("jit", "slices", "global_clipnorm"),
    ("recompute", "clipnorm"),
    ("recompute", "accumulate", "ema"),
)


def comparable(case):
    """Whether one device's step is known to the last digits."""
    settings = {*case.settings}
    # Collectives of a synchronized BatchNormalization stand in no loop over slices and under no XLA.
    if case.model == "cnn" and {"jit", "slices", "accumulate", "recompute"} & settings:
        return False
    # Lion steps by the sign of gradients, of which attention has some near zero; Muon normalizes small matrices.
    if case.optimizer in ("lion", "muon") and case.model != "mlp":
        return False
    # From small accumulators, Ftrl steps by little more than the sign.
    if case.optimizer == "ftrl" and case.model == "transformer":
        return False
    # On one device Keras squares and clips the gradient of each lookup before it sums those of the same row.
    return (
        case.model not in ("recurrent", "both ways")
        or case.optimizer == "sgd"
        and not any("clip" in each for each in settings)
    )


ALL = [
    case
    for case in itertools.starmap(Case, itertools.product(MODELS, OPTIMIZERS, ("optimizer", "parameters"), OPTIONS))
    if case.model != "normalized" and comparable(case)
]
# Every way to compute a gradient. `test_every_kind_of_optimizer` has the ways to apply it, foreign/test_models.py
# attention, and `test_recomputed_loops_are_evaluated_in_shards` a recurrent layer.
FEW = [
    Case("mlp", "adam", "optimizer", ("jit", "slices", "global_clipnorm", "ema_overwrite")),
    Case("mlp", "lamb", "parameters", ("recompute", "accumulate", "ema")),
]
# One loop of a recurrent layer is traced in a third of the time of three.
MORE = [
    Case("cnn", "rmsprop", "parameters", ("global_clipnorm", "loss_scale")),
    Case("recurrent", "sgd", "optimizer", ("ema_overwrite", "accumulate")),
]
# Those that look at a whole variable, each in its way, and one that takes each weight by itself, as all others do.
KINDS = ("adam", "ftrl", "lamb", "adafactor", "muon", "trust_ratio")
# What an optimizer does with the gradient of a whole update.
APPLIED = [
    Case("", *case)
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


def check(cases, devices, workers=1, *, evaluated=True):
    argument = {"devices": devices, "cases": [list(case) for case in cases], "evaluated": evaluated}
    environments = own_process.environments_of_workers(workers) if workers > 1 else [{}]
    seconds = 120 + 40 * len(cases)
    for of_worker in own_process.call(sharded_training.differences, argument, environments, seconds):
        for found in of_worker:
            # Sums of four replicas' gradients move FTRL's weights by 5e-6 without shards as well: it subtracts roots.
            close = 5 * CLOSE if "optimizer='ftrl'" in found["case"] else CLOSE
            limits = {"weights": close, "loss": 1e-5, "evaluation": 1e-5, "predictions": 1e-4}
            assert {name: found[name] for name in limits if found[name] > limits[name]} == {}, found
            assert found["in_shards"] > 0, found


def check_updates(cases):
    argument = {"devices": 2, "cases": [list(case) for case in cases], "updates": 4}
    (found,) = own_process.call(sharded_training.updates, argument, [{}], 60 + 5 * len(cases))
    for each in found:
        assert each["in_shards"] == 4, each
        assert max(each["weights"], each["slots"]) < CLOSE, each


def check_scaled(cases, devices, overflows):
    argument = {"devices": devices, "cases": [list(case) for case in cases], "overflows": overflows}
    for of_worker in own_process.on_workers(scaled_training.updates, argument, seconds=60 + 20 * len(cases)):
        for found in of_worker:
            assert found["in_shards"] == 4, found
            assert found["weights"] < 1e-6, found
            # Four gradients of about 1 that cancel to less than the clip of 0.01 are rounded as those of 1 are.
            assert found["slots"] < (5e-6 if "clipvalue" in found["case"] else 1e-6), found
            assert found["scales"] == found["expected"], found
            assert found["moved"] == [not overflow for overflow in overflows], found


def test_every_kind_of_optimizer():
    cases = [case for case in APPLIED if case.optimizer in KINDS]
    check_updates([cases[index] for index in sorted(covering.chosen(cases, 1))])


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
    check_updates(APPLIED)


def test_two_replicas():
    check(FEW, 2)


@pytest.mark.long
def test_other_layers_on_two_replicas():
    check(MORE, 2)


# In `make test`, distribution/test_exactness.py has three.
@pytest.mark.long
def test_four_replicas():
    check([Case("mlp", "adam", "parameters", ("global_clipnorm", "accumulate", "loss_scale"))], 4)


# In `make test`, distribution/test_exactness.py has Adam in such shards.
@pytest.mark.long
def test_two_workers_with_two_devices():
    check([Case("mlp", "lamb", "parameters")], 2, workers=2)


@pytest.mark.parametrize("model", ["normalized", pytest.param("cnn", marks=pytest.mark.long)])
def test_two_workers_with_synchronized_statistics(model):
    """The backward pass all-reduces them, after gathers that its graph came to have later."""
    check([Case(model, "rmsprop", "parameters")], 1, workers=2, evaluated=model == "cnn")


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


class _Centered(keras.layers.Layer):
    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, axis=0, keepdims=True)


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("shard", ["parameters", "optimizer"])
def test_a_layer_that_mixes_examples_gets_them_all(shard):
    """A trial runs without the other replicas, which have the other shards of the weights."""

    def trained(dist):
        keras.utils.set_random_seed(0)
        with dist.scope():
            layers = [keras.layers.Dense(16), _Centered(name="centered"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((8,)), *layers])
            model.compile("sgd", "mse", jit_compile=False)
        x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
        dist.fit(model, x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    found = trained(DistributedFit("mirrored", ["CPU:0", "CPU:1"], shard=shard, min_shard_bytes=64))
    for one, other in zip(found, trained(DistributedFit("none")), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_an_overflow_on_one_worker_is_an_update_on_none():
    """In the branch of a loss scale, workers gather what an optimizer needs whole, or none of them does."""
    check_scaled([Case("", "lamb", "parameters", ("ema_overwrite", "global_clipnorm"))], 1, [True, False, True, False])


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_every_optimizer_that_needs_whole_variables_under_a_loss_scale(devices):
    needing = [case for case in APPLIED if case.optimizer in ("lamb", "adafactor", "muon", "ftrl", "trust_ratio")]
    check_scaled(needing, devices, [False, True, False, False, True, False])


@pytest.mark.long
def test_two_workers_that_accumulate_scaled_gradients():
    settings = ("loss_scale", "accumulate", "global_clipnorm", "ema")
    check([Case("mlp", "lamb", "parameters", settings), Case("mlp", "muon", "optimizer", settings)], 1, workers=2)


# In `make test`, updates without a model.
@pytest.mark.long
def test_two_workers_that_scale_the_loss():
    check([Case("mlp", "sgd", "optimizer", ("loss_scale", "clipnorm"))], 2, workers=2)


@pytest.mark.long
@pytest.mark.parametrize("model", [name for name in MODELS if name != "normalized"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_combination(model, optimizer):
    """On workers a third, another one with each optimizer, so that all settings meet them."""
    cases = [case for case in ALL if case[:2] == (model, optimizer)]
    turn = list(MODELS).index(model) + list(OPTIMIZERS).index(optimizer)
    # Both: a shard's length decides what Keras takes it for.
    check(cases, 4)
    check(cases, 2)
    check(cases[turn % 3 :: 3], 2, workers=2)
