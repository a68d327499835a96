"""A model that was placed is still what Keras takes it for: it can be changed, looked at and written to."""

import pytest
from runner import own_process
from trainings import placed_training

# Of float32, over some steps.
CLOSE = 1e-6
# The ways that run in `make test`; state is counted, and a loop of one's own goes on, where there is one replica.
FEW = {
    "changed": ["mesh", "columns"],
    "written": ["optimizer"],
    "counted": ["mesh"],
    "stepped": ["mesh"],
}
MORE = {
    "changed": ["pipeline", "fitted", "parameters", "optimizer", "replicas"],
    "written": ["mesh", "pipeline", "columns", "fitted", "parameters", "replicas"],
    "counted": ["pipeline"],
    "stepped": ["pipeline"],
}


@pytest.mark.parametrize("asked", [FEW, pytest.param(MORE, marks=pytest.mark.long)], ids=["few", "more"])
def test_acts_as_on_one_device(asked):
    (found,) = own_process.call(placed_training.compared, asked, [{}], 60 + 30 * sum(map(len, asked.values())))
    for scenario, by_way in found.items():
        for way, differences in by_way.items():
            assert max(differences) <= CLOSE, (scenario, way, differences)


@pytest.mark.long
@pytest.mark.parametrize("way", ["optimizer", pytest.param("parameters", marks=pytest.mark.long)])
def test_a_loop_of_ones_own_does_not_update_shards(way):
    with pytest.raises(RuntimeError, match=r"in shards, and is to be updated.*dist.fit\(model"):
        own_process.call(placed_training.compared, {"stepped": [way]}, [{}], 90)
