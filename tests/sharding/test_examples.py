"""The examples of models that are divided over devices do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed_by(name, *arguments):
    command = [sys.executable, "-P", EXAMPLES / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=True).stdout


@pytest.mark.long
def test_a_model_larger_than_a_device_trains_in_shards_alone():
    whole, in_shards = printed_by("larger_than_a_device.py").splitlines()[1:]
    assert "shard=None: out of memory. OOM when allocating tensor" in whole
    losses = [float(loss) for loss in re.search(r"shard='parameters': trained.* epoch (.*)", in_shards)[1].split()]
    assert losses[-1] < losses[0] / 2


@pytest.mark.long
def test_a_gpt_trains_on_a_mesh(tmp_path):
    printed = printed_by("gpt_hybrid.py", tmp_path)
    assert "characters/embeddings" in printed
    losses = [float(loss) for loss in re.findall(r" loss: ([\d.]+)", printed)]
    assert losses[-1] < losses[0] * 0.8
    assert "The statement " in printed
    assert (tmp_path / "report.html").exists()
