"""A training whose machines come and go ends where one undisturbed device does; `make soak` has half an hour of it."""

import functools
import random

import pytest
from runner import own_process
from soak import run as soak
from soak.worlds import Machines


# In `make test`, launchers without TensorFlow come and go in test_launch_nodes.py; test_shards.py goes on elsewhere.
@pytest.mark.long
@pytest.mark.parametrize("kind", ["shards", "windows, same bits"])
def test_machines_that_come_and_go(kind, tmp_path):
    (undisturbed,) = own_process.call(soak.undisturbed, kind, [{}], seconds=200)
    machines = Machines(
        kind, tmp_path / "machines", random.Random(3), 3, functools.partial(soak.largest_difference, kind)
    )
    machines.run(soak.comparable(undisturbed))
    assert len(set(machines.sizes)) > 1, machines.said
