"""Training in shards ends where one device ends: every optimizer, clip and way to cut a batch."""

import itertools

import covering
import own_process
import pytest
import sharded_training
from sharded_training import MODELS, OPTIMIZERS, Case

# Rounding of the largest weight over six updates; scaled to the largest weight.
CLOSE = 2e-6
OPTIONS = (
    (),
    ("clipnorm",),
    ("global_clipnorm", "accumulate"),
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
    # On one device Keras squares and clips the gradient of each lookup before it sums those of the same row.
    return case.model != "recurrent" or case.optimizer == "sgd" and not any("clip" in each for each in settings)


ALL = [
    case
    for case in itertools.starmap(Case, itertools.product(MODELS, OPTIMIZERS, ("optimizer", "parameters"), OPTIONS))
    if comparable(case)
]
# Every optimizer, and every option, by the model that is traced soonest.
SOONEST = [case for case in ALL if case.model == "mlp"]
FEW = [
    *(SOONEST[index] for index in sorted(covering.chosen(SOONEST, 1))),
    # foreign/test_models.py has attention.
    Case("cnn", "rmsprop", "parameters", ("global_clipnorm", "loss_scale")),
    Case("recurrent", "sgd", "optimizer", ("ema_overwrite", "accumulate")),
]


def check(cases, devices, workers=1):
    argument = {"devices": devices, "cases": [list(case) for case in cases]}
    environments = own_process.environments_of_workers(workers) if workers > 1 else [{}]
    seconds = 120 + 40 * len(cases)
    for of_worker in own_process.call(sharded_training.differences, argument, environments, seconds):
        for found in of_worker:
            limits = {"weights": CLOSE, "loss": 1e-5, "evaluation": 1e-5, "predictions": 1e-4}
            assert {name: found[name] for name in limits if found[name] > limits[name]} == {}, found
            assert found["in_shards"] > 0, found


def test_two_replicas():
    check(FEW, 2)


def test_four_replicas():
    check([Case("mlp", "adam", "parameters", ("global_clipnorm", "accumulate"))], 4)


def test_two_workers_with_two_devices():
    check([Case("mlp", "lamb", "parameters")], 2, workers=2)


# In `make test`, two replicas scale the loss.
@pytest.mark.long
def test_two_workers_that_scale_the_loss():
    check([Case("mlp", "sgd", "optimizer", ("loss_scale", "clipnorm"))], 2, workers=2)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_combination(model, optimizer):
    check([case for case in ALL if case[:2] == (model, optimizer)], 4)
    check([case for case in ALL if case[:2] == (model, optimizer)], 2)
    check([case for case in ALL if case[:2] == (model, optimizer)][::3], 2, workers=2)
