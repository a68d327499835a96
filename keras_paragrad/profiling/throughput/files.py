"""The files in Throughput's log directory: its tables and scalars, and the profile that it reads."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_paragrad.engine.telemetry.counts import TracedGraph
from keras_paragrad.plain_json import read_json
from keras_paragrad.profiling.summary import ProfileSummary
from keras_paragrad.profiling.telemetry.sinks import Guarded, Scalars
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

    def excluded(self, step: int, epoch: int, seconds: Mapping[str, float]) -> None:
        """Writes to the table only how long the excluded parts took, by name."""
        labels, values = [(name,) for name in seconds], np.array([list(seconds.values())], float)
        self._guarded(lambda: self._table.append([step], [epoch], labels, values))

    def retraced(self, step: int, traces: Iterable[TracedGraph]) -> None:
        """Writes retraces."""
        self._guarded(lambda: self._write([(step, *trace) for trace in traces]))

    def close(self) -> None:
        """Closes the files."""
        for file in (self._table, self._scalars):
            if file is not None:
                Guarded(self._guarded.what)(file.close)

    def _write(self, rows: Iterable[tuple]) -> None:
        with self._retraces.open("a", newline="", encoding="utf-8") as lines:
            csv.writer(lines, lineterminator="\n").writerows(rows)


def collective_share(log_dir: Path) -> float | None:
    """The share of step time in collectives, in the newest profile of a log directory, or `None`."""
    summaries = sorted(log_dir.glob("plugins/profile/*/keras_paragrad.json"))
    if not summaries:
        return None
    try:
        steps = ProfileSummary.from_dict(read_json(summaries[-1].read_text(encoding="utf-8"))).steps
    except (OSError, ValueError, KeyError, TypeError):
        return None
    duration = sum(step.duration for step in steps)
    return sum(step.collective for step in steps) / duration if duration else None
