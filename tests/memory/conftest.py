"""Ways to train a model, as estimated on a machine of one speed."""

import pytest
from trainings.planned_models import ROWS, SPEED, deep

from keras_paragrad.memory import breakdown
from keras_paragrad.memory import plan as plans
from keras_paragrad.memory.plan import plan_memory


@pytest.fixture
def same_speed(monkeypatch):
    """Estimates don't depend on what else the machine does."""
    monkeypatch.setattr(plans, "measure_speed", lambda: SPEED)


def leave_out_graph(patch):
    patch.setattr(breakdown, "_RUNTIME", 0)
    patch.setattr(breakdown, "_OF_OPERATION", 0)


@pytest.fixture
def no_graph(monkeypatch):
    """Estimates of small models don't count the graph, which takes more than their tensors."""
    leave_out_graph(monkeypatch)


@pytest.fixture(scope="module")
def ways():
    """Ways to train a model, by estimated seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "measure_speed", lambda: SPEED)
        patch.setattr(plans, "_CERTAIN", 0.0)
        leave_out_graph(patch)
        return plan_memory(deep(), ROWS, 2**40, None)
