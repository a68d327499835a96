"""Training on replicas and workers ends where one device ends, in cells in which all pairs of settings meet."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from exactness_cell import AXES, DEVICES, PIPELINES, TIME_LIMIT, completed, environments, holds, train, worst
from exactness_matrix import cells_covering
from own_process import call

CELLS = cells_covering(2)


def few_of(cells):
    """Indices of few cells that have every setting, in float32, whose bound is tight, and one in float16."""
    # Of pipelines the last, which has all that the others have: sharding/test_pipeline.py has more of them.
    others = {HALF, *(("replicas", name) for name in list(PIPELINES)[:-1])}
    left = {(name, value) for name, values in AXES.items() for value in values} - others
    chosen = [index for index, cell in enumerate(cells) if HALF in cell.items() and cell["accumulation"] == "on"][:1]
    strict = [index for index, cell in enumerate(cells) if HALF not in cell.items()]
    while left:
        chosen.append(max(strict, key=lambda index: len(left & cells[index].items()) / (1 + cost(cells[index]))))
        left -= cells[chosen[-1]].items()
    return chosen


def cost(cell):
    """How long a cell takes beside others: each replica is traced, and XLA takes twice as long as that."""
    processes = 2 if "workers" in cell["replicas"] else 1
    return processes * DEVICES[cell["replicas"]] * (3 if cell["jit"] == "on" else 1) / 6


HALF = ("precision", "mixed_float16")
FEW = few_of(CELLS)


def run(cell, way="ours"):
    cell = completed(cell)
    return worst(call(train, {**cell, "way": way}, environments(cell), TIME_LIMIT))


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if index in FEW else pytest.mark.long) for index, cell in enumerate(CELLS)],
    ids=lambda cell: "-".join(str(value).replace(" ", "_") for value in cell.values()),
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
