"""Training on replicas and workers ends where one device ends, in cells in which all pairs of settings meet."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from exactness_cell import TIME_LIMIT, completed, environments, holds, train, worst
from exactness_matrix import cells_covering
from own_process import call

CELLS = cells_covering(2)


def run(cell, way="ours"):
    cell = completed(cell)
    return worst(call(train, {**cell, "way": way}, environments(cell), TIME_LIMIT))


@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda cell: "-".join(str(value).replace(" ", "_") for value in cell.values())
)
def test_ends_where_one_device_ends(cell):
    result = run(cell)
    assert holds(cell, result), result


def test_the_measure_sees_what_keras_alone_gets_wrong():
    cell = {"batches": "uneven last", "clip": "global_clipnorm"}
    assert not holds(cell, run(cell, "stock"))


def test_the_measure_sees_what_keras_alone_does_not_train():
    with pytest.raises(RuntimeError, match="AddN must have the same size and shape"):
        run({"batches": "uneven first", "clip": "global_clipnorm"}, "stock")
