"""Training on replicas and workers ends where one device ends, in cells in which all pairs of settings meet."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from exactness_cell import holds, run
from exactness_matrix import cells_covering

CELLS = cells_covering(2)


@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda cell: "-".join(str(value).replace(" ", "_") for value in cell.values())
)
def test_ends_where_one_device_ends(cell):
    result = run(cell)
    assert holds(cell, result), json.dumps(result)


@pytest.mark.parametrize("batches", ["uneven first", "uneven last"])
def test_the_measure_sees_what_keras_alone_gets_wrong(batches):
    cell = {"batches": batches, "clip": "global_clipnorm"}
    assert not holds(cell, run(cell, "stock"))
