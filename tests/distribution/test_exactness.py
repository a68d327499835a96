"""Training on replicas and workers ends where one device ends, in cells in which all pairs of settings meet."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from exactness_cell import AXES, PIPELINES, TIME_LIMIT, completed, environments, holds, train, worst
from exactness_matrix import cells_covering
from runner.own_process import call

CELLS = cells_covering(2)
# In `make test`, few cells that have every setting: in float32, whose bound is tight, and one in float16. What a cell
# leaves out is the first of its axis.
FEW = [
    {"clip": "clipvalue", "weights": "class", "replicas": "mirrored x3", "shard": "optimizer"},
    {
        **{"replicas": "mirrored x2", "optimizer": "Muon", "clip": "global_clipnorm", "batches": "uneven first"},
        **{"weights": "class", "jit": "on", "accumulation": "on", "shard": "parameters"},
    },
    {
        **{"replicas": "2 workers x 2 devices", "optimizer": "Adam", "clip": "global_clipnorm"},
        **{"batches": "uneven first", "shard": "parameters"},
    },
    {
        **{"replicas": "mesh (2, 2)", "optimizer": "Lamb", "batches": "uneven last", "weights": "class"},
        **{"steps_per_execution": 4, "accumulation": "on"},
    },
    {"replicas": "DataParallel x4", "optimizer": "AdamW", "clip": "clipnorm", "batches": "uneven last"},
    {
        **{"replicas": "pipeline 2 x 2, skips", "optimizer": "Lion", "clip": "global_clipnorm"},
        **{"batches": "uneven last", "weights": "sample", "steps_per_execution": 4},
    },
    {"precision": "mixed_float16", "optimizer": "Lamb", "clip": "clipvalue", "accumulation": "on"},
]
# Those above have all that these have: three replicas, both axes of a mesh, several workers, the most of a pipeline.
LIKE_OTHERS = {
    ("replicas", name) for name in ("mirrored x4", "2 workers", "mesh (4, 1)", "mesh (1, 4)", *list(PIPELINES)[:-1])
}


def run(cell, way="ours"):
    cell = completed(cell)
    return worst(call(train, {**cell, "way": way}, environments(cell), TIME_LIMIT))


@pytest.mark.parametrize(
    "cell",
    [*FEW, *(pytest.param(cell, marks=pytest.mark.long) for cell in CELLS)],
    ids=lambda cell: "-".join(str(value).replace(" ", "_") for value in cell.values()),
)
def test_ends_where_one_device_ends(cell):
    result = run(cell)
    assert holds(cell, result), result


def test_few_cells_have_every_setting():
    had = set().union(*(completed(cell).items() for cell in FEW))
    assert had | LIKE_OTHERS == {(name, value) for name, values in AXES.items() for value in values}


@pytest.mark.long
def test_the_measure_sees_what_keras_alone_gets_wrong():
    cell = {"batches": "uneven last", "clip": "global_clipnorm"}
    assert not holds(cell, run(cell, "stock"))


@pytest.mark.long
def test_the_measure_sees_what_keras_alone_does_not_train():
    with pytest.raises(RuntimeError, match="AddN must have the same size and shape"):
        run({"batches": "uneven first", "clip": "global_clipnorm"}, "stock")
