"""The example of a model that is larger than a device fails as replicas, and trains in shards."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "larger_than_a_device.py"


@pytest.mark.long
def test_only_shards_train():
    finished = subprocess.run([sys.executable, "-P", EXAMPLE], capture_output=True, text=True, timeout=600, check=True)
    whole, in_shards = finished.stdout.splitlines()[1:]
    assert "shard=None: out of memory. OOM when allocating tensor" in whole
    losses = [float(loss) for loss in re.search(r"shard='parameters': trained.* epoch (.*)", in_shards)[1].split()]
    assert losses[-1] < losses[0] / 2
