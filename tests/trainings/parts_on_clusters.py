"""Trainings on clusters, in processes of their own, without the private names of the parts that they don't look for."""

from typing import Any

from seam import taken_away
from trainings import every_component

import keras_paragrad as paragrad
from keras_paragrad.compat import check
from keras_paragrad.compat.names import NAMES
from keras_paragrad.distribution import servers


def _trained(dist: paragrad.DistributedFit) -> tuple[float, list[str]]:
    parts = set(check.FOUND)
    with dist.scope():
        model = every_component.network()
    with taken_away.without(NAMES.keys() - parts):
        every_component.train(model, fit=lambda *arguments, **keywords: dist.fit(*arguments, **keywords))
    assert parts == check.FOUND, "it has looked for more after it was made"
    return every_component.from_whole(model), sorted(parts)


def on_a_worker(_: Any) -> tuple[float, list[str]]:
    """On one of several workers, the difference from one device on whole batches, and the parts looked for."""
    return _trained(paragrad.DistributedFit("multi_worker", jit=False))


def with_a_server(_: Any) -> tuple[float, list[str]]:
    """With one worker, which takes steps in order, and one parameter server."""
    strategy = servers.make_parameter_server_strategy(servers.in_process_cluster(workers=1, servers=1))
    return _trained(paragrad.DistributedFit(strategy, exact=False))
