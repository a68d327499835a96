"""A cluster within the process of a test."""

import pytest
import tensorflow as tf
from runner import own_process

from keras_paragrad.distribution import servers


@pytest.fixture
def strategy(request) -> tf.distribute.ParameterServerStrategy | None:
    """Two workers and two servers; for tests marked `own_process`."""
    assert request.node.get_closest_marker("own_process"), "mark the test with pytest.mark.own_process"
    # Outside, the test is not run.
    if not own_process.is_this_one():
        return None
    return servers.make_parameter_server_strategy(servers.in_process_cluster(workers=2, servers=2))
