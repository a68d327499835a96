"""The example for Ray trains on two workers what one device trains; on a real Ray cluster, too."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster" / "ray_train.py"
sys.path.insert(0, str(EXAMPLE.parent))

import ray_train
from runner import own_process

SECONDS, EPOCHS = 240, 1


def on_a_ray_cluster(directory: Path, weights: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}
    options = ["--workers", "2", "--weights", weights, "--storage", str(directory / "storage")]
    command = [sys.executable, "-P", str(EXAMPLE), "--epochs", str(EPOCHS), *options]
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=SECONDS)
        finally:
            # Ray's own processes end when the one that started them does.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out[-6000:]


def weights_in(path: Path) -> dict[str, np.ndarray]:
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return {name: value for name, value in found.items() if name.startswith("layers")}


def on_workers(directory: Path, weights: str) -> None:
    """With the environment that Ray gives its workers."""
    own_process.on_workers(ray_train.train, {"epochs": EPOCHS, "weights": str(directory / weights)}, SECONDS)


# Ray takes most of a minute to start. In `make test`, test_workers.py has two workers.
@pytest.mark.long
@pytest.mark.parametrize("run", [on_workers, on_a_ray_cluster])
def test_two_workers_equal_one_device(tmp_path, run):
    run(tmp_path, "two.weights.h5")
    own_process.call(ray_train.train, {"epochs": EPOCHS, "weights": str(tmp_path / "one.weights.h5")}, [{}], SECONDS)
    two, one = weights_in(tmp_path / "two.weights.h5"), weights_in(tmp_path / "one.weights.h5")
    assert two.keys() == one.keys() and len(one) == 4
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, atol=1e-6, rtol=0, err_msg=name)
