"""Grain's batches on several workers: each reads its rows of a batch alone, where they have random access."""

import importlib
from typing import Any, NamedTuple

import keras

from keras_paragrad.compat.data import adapter_of, is_grain
from keras_paragrad.compat.types import Batch, FitData
from keras_paragrad.compat.workers import ReplicaPlacement
from keras_paragrad.distribution.data.sources import StreamSource, is_endless


class PlainBatches(NamedTuple):
    """Batches that Grain stacks from consecutive elements, both with random access.

    Attributes:
        batches: The `grain.MapDataset` of the batches.
        rows: The one of the elements.
        size: Rows per batch; the last one may have fewer.
    """

    batches: Any
    rows: Any
    size: int


def plain_batches(x: FitData) -> PlainBatches | None:
    """The batches of a Grain dataset, or `None` if it transforms them, or lacks random access. Nothing is read."""
    source = _source_of_iterator(x)
    dataset, parents = (x, getattr(x, "parents", ())) if source is None else (source, source.parents)
    if not is_grain(dataset) or len(parents) != 1:
        return None
    parent = parents[0]
    rows = parent if hasattr(parent, "__len__") else _source_of_iterator(parent)
    if rows is None:
        return None
    # Grain keeps the batch size in a private attribute: try all integers, and compare with what `batch` makes of each.
    for size in {value for value in vars(dataset).values() if type(value) is int and value > 0}:
        for drop_remainder in (False, True):
            if _is_like(dataset, parent.batch(size, drop_remainder=drop_remainder)):
                try:
                    return PlainBatches(rows.batch(size, drop_remainder=drop_remainder), rows, size)
                except ValueError:  # Grain refuses it where some elements are filtered out.
                    return None
    return None


def _source_of_iterator(dataset: Any) -> Any:
    """The `MapDataset` that `to_iter_dataset()` made a dataset of, or `None`."""
    parents = getattr(dataset, "parents", ())
    if not is_grain(dataset) or len(parents) != 1 or not hasattr(parents[0], "to_iter_dataset"):
        return None
    return parents[0] if _is_like(dataset, parents[0].to_iter_dataset()) else None


def _is_like(dataset: Any, made: Any) -> bool:
    """Whether a dataset is what Grain has just made, of the same parents with the same arguments."""
    attributes = vars(dataset)
    arguments = {name: value for name, value in vars(made).items() if name.startswith("_")}
    return type(dataset) is type(made) and all(
        name in attributes and attributes[name] == value for name, value in arguments.items()
    )


class _WorkerRows:
    """The rows of each batch that the replicas of a worker get, by the index of the batch."""

    def __init__(self, batches: PlainBatches, placement: ReplicaPlacement):
        self._batches = batches
        self._placement = placement
        self._total = len(batches.rows)

    def __len__(self) -> int:
        return len(self._batches.batches)

    def __getitem__(self, index: int) -> Batch:
        _, elements, size = self._batches
        placement = self._placement
        start = index * size
        count = min(size, self._total - start)
        bounds = [placement.first_row(count, placement.first + local) for local in (0, placement.local)]
        rows = [elements[row] for row in range(start + bounds[0], start + bounds[1])]
        if any(row is None for row in rows):
            raise ValueError(
                "Elements of the Grain dataset are None, which to_iter_dataset() leaves out, so workers can't tell "
                'which rows are theirs. Leave them out by .filter(...), or write shard_policy="data".'
            )
        if not rows:
            return keras.tree.map_structure(lambda leaf: leaf[:0], _stacked([elements[start]]))
        return _stacked(rows)


def _stacked(rows: list[Any]) -> Batch:
    """The rows as one batch, stacked by Grain."""
    grain: Any = importlib.import_module("grain")
    return grain.MapDataset.source(rows).batch(len(rows))[0]


class GrainRowsSource(StreamSource):
    """This worker's rows of Grain's batches.

    Args:
        batches: All workers' batches. The first batch is read whole: the workers compare it.
        placement: The replicas of this worker.
    """

    def __init__(self, batches: PlainBatches, placement: ReplicaPlacement):
        grain: Any = importlib.import_module("grain")
        whole = grain.MapDataset.source(_WorkerRows(batches, ReplicaPlacement(1, 1, 0)))
        super().__init__(adapter_of(whole.slice(slice(0, 1)), None, None))
        local = grain.MapDataset.source(_WorkerRows(batches, placement))
        self._batches = adapter_of(local, None, None).get_tf_dataset()
        endless = is_endless(local)
        self.steps = None if endless else len(batches.batches)
        self.rows = None if endless else len(batches.rows)
        self.batch_size = batches.size
        self.own_rows = True
