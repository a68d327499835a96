"""A model that was placed is still what Keras takes it for: it can be changed, looked at and written to."""

import own_process
import placed_training
import pytest

# Of float32, over some steps.
CLOSE = 1e-6
FEW = ["mesh", "columns", "auto", "optimizer"]


def check(asked):
    (found,) = own_process.call(placed_training.compared, asked, [{}], 60 + 30 * sum(map(len, asked.values())))
    for scenario, by_way in found.items():
        for way, differences in by_way.items():
            assert max(differences) <= CLOSE, (scenario, way, differences)


@pytest.mark.parametrize("scenario", placed_training.SCENARIOS)
def test_acts_as_on_one_device(scenario):
    check({scenario: FEW})


@pytest.mark.long
def test_acts_as_on_one_device_in_more_ways():
    check({each: [way for way in placed_training.WAYS if way not in FEW] for each in placed_training.SCENARIOS})
