"""Keras's own tests of `DataParallel` and `ModelParallel`, from the installed wheel, which Keras runs on JAX alone."""

from pathlib import Path

import keras
import pytest
from own_process import run_pytest

TESTS = Path(keras.__file__).parent / "src" / "distribution" / "distribution_lib_test.py"


@pytest.mark.parametrize(
    "suite", ["DataParallelDistributionTest", "ModelParallelDistributionTest", "DataShardingIntegrationTest"]
)
def test_of_keras(suite):
    options = ["-q", "--tb=short", "-W", "ignore", "-c", "/dev/null", "--rootdir", str(TESTS.parents[3])]
    run_pytest([*options, "-p", "keras_on_meshes", "-p", "no:cacheprovider", f"{TESTS}::{suite}"], 120)
