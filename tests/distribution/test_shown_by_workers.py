"""What `fit`, `evaluate` and `*_on_batch` show on two workers, each a process of its own, is what one device shows."""

import numpy as np
import pytest
from oracles.histories import CASES
from runner import own_process
from sample_models import hub_task
from sample_models.comparing_losses import LOSSES
from sample_models.own_steps import CASES as OWN_STEPS
from workers import shown_worker

SHORT = [
    # In `make test`, test_history.py has other losses on replicas, test_own_steps.py other steps.
    # And test_metrics.py has metrics on the workers' collectives.
    *("loss: two weighted", "own step: Tracking", "comparing: classes"),
]
ALL = [
    *(f"loss: {name}" for name in CASES),
    *(f"own step: {name}" for name in OWN_STEPS),
    *(f"comparing: {name}" for name in LOSSES),
    # In `make test`, test_own_fit.py has a model with a `fit` of its own on replicas.
    *("task: preprocessor=None", "task: with a preprocessor"),
    # In `make test`, test_metrics.py has all of them on the workers' collectives.
    *("metrics: of batches read", "metrics: of whole batches"),
]


# Keras says it of every dataset that a task's own `fit` hands on.
pytestmark = pytest.mark.filterwarnings("ignore:.*shuffle=True.* was passed, but will be ignored:UserWarning")


@pytest.fixture(scope="module")
def shown():
    """What each case of `SHORT` has shown on each of two workers of one cluster."""
    return own_process.on_workers(shown_worker.main, SHORT, seconds=360)


def check(name, found):
    first, second = (worker[name] for worker in found)
    kind, _, case = name.partition(": ")
    if kind == "task":
        pytest.importorskip("keras_hub")
        pytest.importorskip("tensorflow_text")
    assert not isinstance(first, str), first
    expected = shown_worker.KINDS[kind](None, case)
    if kind == "task":
        for each in (first, second):
            hub_task.assert_same(each, expected)
        return
    assert first == second
    assert first.keys() == expected.keys()
    for key, values in expected.items():
        # Keras's metrics round more than its losses.
        np.testing.assert_allclose(first[key], values, rtol=2e-6, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", SHORT)
def test_what_workers_show(shown, name):
    check(name, shown)


@pytest.mark.long
def test_what_workers_show_of_every_loss_and_step():
    names = [name for name in ALL if name not in SHORT]
    found = own_process.on_workers(shown_worker.main, names, seconds=600)
    for name in names:
        check(name, found)
