"""Ways to train a model, as estimated on a machine of one speed."""

import pytest
from trainings.planned_models import ROWS, SPEED, deep

from keras_paragrad.memory import plan as plans
from keras_paragrad.memory.plan import plan_memory


@pytest.fixture
def same_speed(monkeypatch):
    """Estimates don't depend on what else the machine does."""
    monkeypatch.setattr(plans, "measure_speed", lambda: SPEED)


@pytest.fixture(scope="module")
def ways():
    """Ways to train a model, by estimated seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "measure_speed", lambda: SPEED)
        patch.setattr(plans, "_CERTAIN", 0.0)
        patch.setattr(plans, "_RUNTIME", 0)
        patch.setattr(plans, "_OF_OPERATION", 0)
        return plan_memory(deep(), ROWS, 2**40, None)
