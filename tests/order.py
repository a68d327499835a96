"""Which modules' tests are run first: a slow one begun last would leave the other workers idle."""

from pathlib import Path

import pytest

# Those of more than half a minute, beginning with those that wait most.
SLOW = (
    "distribution/test_alike.py",
    "distribution/test_ray.py",
    "distribution/test_shown_by_workers.py",
    "distribution/test_history.py",
    "foreign/test_models.py",
    "per_example/test_wrap.py",
    "distribution/test_exactness.py",
    "distribution/test_workers.py",
    "distribution/checkpoint/test_backup.py",
    "sharding/test_recompute.py",
    "per_example/test_rules.py",
    "per_example/test_training.py",
    "distribution/test_fit.py",
    "distribution/servers/test_training.py",
    "profiling/telemetry/test_values.py",
    "profiling/browser/test_tensorboard.py",
    "accumulation/test_replicas.py",
    "accumulation/test_microbatch.py",
    "accumulation/test_independence.py",
    "distribution/test_own_fit.py",
    "distribution/checkpoint/test_gang.py",
)


def slowest_first(items: list[pytest.Function], tests: Path) -> None:
    """Sorts, in place, what pytest has collected.

    Args:
        items: The tests.
        tests: The folder that the modules are named in.
    """
    ranks = {tests / name: rank for rank, name in enumerate(SLOW)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
