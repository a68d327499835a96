"""Keras's own tests of `DataParallel` and `ModelParallel`, from the installed wheel, which Keras runs on JAX alone."""

from pathlib import Path

import keras
import pytest
from runner.own_process import run_pytest

SOURCES = Path(keras.__file__).parent / "src"
TESTS = SOURCES / "distribution" / "distribution_lib_test.py"
pytestmark = pytest.mark.skipif(not TESTS.exists(), reason="this wheel of Keras has none of its tests")
OPTIONS = ["-q", "--tb=short", "-W", "ignore", "-c", "/dev/null", "--rootdir", str(SOURCES.parents[1])]


@pytest.mark.long
@pytest.mark.parametrize(
    "suite", ["DataParallelDistributionTest", "ModelParallelDistributionTest", "DataShardingIntegrationTest"]
)
def test_of_keras(suite):
    run_pytest([*OPTIONS, "-p", "keras_suite.keras_on_meshes", "-p", "no:cacheprovider", f"{TESTS}::{suite}"], 120)
