"""Which modules' tests are run first: a slow one begun last would leave the other workers idle."""

from pathlib import Path

import pytest

# Those of more than half a minute, beginning with those that wait most, and those with the longest single tests.
SLOW = (
    "distribution/test_alike.py",
    "sharding/test_shards.py",
    "distribution/checkpoint/test_gang.py",
    "distribution/test_exactness.py",
    "distribution/checkpoint/test_backup.py",
    "test_gpu.py",
    "distribution/checkpoint/test_shards.py",
    "distribution/test_workers.py",
    "distribution/test_shown_by_workers.py",
    "per_example/test_wrap.py",
    "sharding/test_recompute.py",
    "sharding/test_pipeline.py",
    "test_docs.py",
    "distribution/test_history.py",
    "profiling/telemetry/test_values.py",
    "per_example/test_rules.py",
    "distribution/test_fit.py",
    "foreign/test_models.py",
    "per_example/test_training.py",
    "profiling/browser/test_tensorboard.py",
    "accumulation/test_independence.py",
    "distribution/servers/test_training.py",
    "keras_suite/test_keras_suite.py",
    "sharding/test_estimate.py",
    "test_transform.py",
    "accumulation/test_microbatch.py",
    "accumulation/test_replicas.py",
    "per_example/test_models.py",
    "per_example/test_nonfinite.py",
    "per_example/test_masked_mean.py",
    "accumulation/test_uncut.py",
    "accumulation/test_weights.py",
    "profiling/test_tracer.py",
)


def slowest_first(items: list[pytest.Function], tests: Path) -> None:
    """Sorts, in place, what pytest has collected.

    Args:
        items: The tests.
        tests: The folder that the modules are named in.
    """
    ranks = {tests / name: rank for rank, name in enumerate(SLOW)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
