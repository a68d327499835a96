"""Throughput's output: two tables and TensorBoard."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_paragrad._keras.telemetry.counts import TracedGraph
from keras_paragrad.profiling.telemetry.scalars import Scalars
from keras_paragrad.profiling.telemetry.sinks import Guarded
from keras_paragrad.profiling.telemetry.tables import Table, begin_csv


class Files:
    """Writes `throughput.csv`, `retraces.csv` and scalars into a log directory.

    Args:
        log_dir: The directory.
        resume: Whether existing files belong to the same training.
    """

    def __init__(self, log_dir: Path, resume: bool):
        self._guarded = Guarded(f"Throughput in {log_dir}")
        self._table: Any = self._guarded(lambda: Table(log_dir / "throughput.csv", ("quantity",), resume))
        self._scalars: Any = self._guarded(lambda: Scalars(log_dir, ".throughput"))
        self._retraces = log_dir / "retraces.csv"
        self._guarded(lambda: begin_csv(self._retraces, ("step", "function", "signature"), resume))

    def append(self, step: int, epoch: int, figures: Mapping[str, float]) -> None:
        """Writes figures, by name."""
        labels, values = [(name,) for name in figures], np.array([list(figures.values())], float)
        self._guarded(lambda: self._table.append([step], [epoch], labels, values))
        tags = [f"throughput/{name}" for name in figures]
        self._guarded(lambda: self._scalars.append(np.array([step]), tags, values))

    def left_out(self, step: int, epoch: int, seconds: Mapping[str, float]) -> None:
        """Writes to the table only how long the excluded parts took, by name."""
        labels, values = [(name,) for name in seconds], np.array([list(seconds.values())], float)
        self._guarded(lambda: self._table.append([step], [epoch], labels, values))

    def retraced(self, step: int, traces: Iterable[TracedGraph]) -> None:
        """Writes graphs that were traced again."""
        self._guarded(lambda: self._write([(step, *trace) for trace in traces]))

    def close(self) -> None:
        """Closes the files."""
        for file in (self._table, self._scalars):
            if file is not None:
                Guarded(self._guarded.what)(file.close)

    def _write(self, rows: Iterable[tuple]) -> None:
        with self._retraces.open("a", newline="", encoding="utf-8") as lines:
            csv.writer(lines, lineterminator="\n").writerows(rows)
