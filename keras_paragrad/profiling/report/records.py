"""Reads a run's per-step records: telemetry, throughput and retraces."""

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keras_paragrad.extras import require

MOST_RETRACES = 50


@dataclass(frozen=True)
class Series:
    """One quantity as a series over the steps.

    Attributes:
        quantity: Its name in the file.
        name: What it belongs to: a layer and its variable, or `""` for the whole model.
        variable: The variable only, or `""` for the whole layer.
        steps: The steps, ascending, shape `(values,)`.
        values: The values, not all of them finite, shape `(values,)`.
    """

    quantity: str
    name: str
    variable: str
    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """The finite values."""
        return self.values[np.isfinite(self.values)]


@dataclass(frozen=True)
class Retrace:
    """A retrace of a function.

    Attributes:
        step: When.
        function: Which.
        signature: The shapes it was traced for.
    """

    step: str
    function: str
    signature: str


def read_series(folder: Path, name: str) -> tuple[Series, ...]:
    """All series of `<name>.csv`, or of `<name>.parquet`, in a folder, by quantity and name; none without the file.

    Incomplete rows, such as the last one of a killed run, are skipped. Of two values for one step, as written by a run
    that resumed from a checkpoint, the later one counts.
    """
    found: dict[tuple[str, str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for row in _rows(folder, name):
        try:
            step, value = float(row["step"]), float(row["value"])
            variable = row.get("variable") or ""
            key = str(row["quantity"]), "/".join(part for part in (row.get("layer"), variable) if part), variable
        except (KeyError, TypeError, ValueError):
            continue
        # Not a valid step: the row is truncated, or belongs to another file.
        if math.isfinite(step):
            found[key][0].append(step)
            found[key][1].append(value)
    return tuple(_in_order(*key, *map(np.array, columns)) for key, columns in found.items())


def worth_showing(series: Iterable[Series]) -> tuple[Series, ...]:
    """The series without clipped gradients where nothing was clipped, and without a loss scale that is not used."""
    series = tuple(series)
    before = {one.name: one for one in series if one.quantity == "gradient_norm"}

    def is_idle(one: Series) -> bool:
        if one.quantity == "clipped_gradient_norm" and one.name in before:
            return np.array_equal(one.values, before[one.name].values, equal_nan=True)
        return one.quantity == "loss_scale" and bool((one.values == 1).all())

    return tuple(one for one in series if not is_idle(one))


def read_retraces(folder: Path) -> tuple[tuple[Retrace, ...], int]:
    """The last retraces of a run, and how many there were in all."""
    columns = ("step", "function", "signature")
    found = [
        Retrace(*(str(row[column]) for column in columns))
        for row in _rows(folder, "retraces")
        if all(row.get(column) for column in columns)
    ]
    return tuple(found[-MOST_RETRACES:]), len(found)


def _rows(folder: Path, name: str) -> Iterable[Mapping[str, str]]:
    comma, parquet = folder / f"{name}.csv", folder / f"{name}.parquet"
    if comma.is_file():
        return _comma_rows(comma)
    return _parquet_rows(parquet) if parquet.is_file() else ()


def _comma_rows(path: Path) -> Iterator[Mapping[str, str]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as lines:
        # A full disk can leave zero bytes behind.
        yield from csv.DictReader(line.replace("\0", "") for line in lines)


def _parquet_rows(path: Path) -> Iterator[Mapping[str, str]]:
    require(f"Reading {path}", "pyarrow")
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())


def _in_order(quantity: str, name: str, variable: str, steps: np.ndarray, values: np.ndarray) -> Series:
    ordered, last = np.unique(steps[::-1], return_index=True)
    return Series(quantity, name, variable, ordered, values[::-1][last])
