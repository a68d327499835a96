"""Figures in long form, a row for each: in a CSV or a Parquet file."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Stands for the step and the epoch in a report's lines; no label has it.
_WHEN = "\0"


class Table:
    """A file with columns `step`, `epoch`, labels of your own and `value`.

    A CSV file is whole after every `append`, a Parquet file after `close`. Values have twelve digits in CSV.

    Args:
        path: The file; its suffix, `.csv` or `.parquet`, says what it is.
        labels: The names of the columns between `epoch` and `value`.
        resume: Whether to go on with the file where it ends, if there is one.
    """

    def __init__(self, path: Path, labels: Sequence[str], resume: bool):
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = ["step", "epoch", *labels, "value"]
        self._file = _Parquet(path, columns, resume) if path.suffix == ".parquet" else _Csv(path, columns, resume)

    def append(self, steps: Any, epochs: Any, labels: Sequence[tuple[str, ...]], values: np.ndarray) -> None:
        """Writes rows.

        Args:
            steps: Steps, shape `(reports,)`.
            epochs: The epoch of each, shape `(reports,)`.
            labels: The labels of each column of `values`.
            values: Shape `(reports, len(labels))`.
        """
        self._file.append(steps, epochs, labels, values)

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


class _Csv:
    def __init__(self, path: Path, columns: Sequence[str], resume: bool):
        self._path = path
        if not (resume and path.exists()):
            path.write_text(_quoted(columns) + "\n", encoding="utf-8", newline="")
        self._of: Sequence[tuple[str, ...]] = ()
        self._report = ""

    def append(self, steps: Any, epochs: Any, labels: Sequence[tuple[str, ...]], values: np.ndarray) -> None:
        if labels is not self._of:
            # Any two numbers of 32 bits differ in nine digits; all seventeen take three times as long.
            lines = [_quoted(label).replace("%", "%%") for label in labels]
            self._of, self._report = labels, "".join(f"{_WHEN},{line},%.12g\n" for line in lines)
        # Opened each time: a training that breaks off leaves no file open.
        with self._path.open("a", newline="", encoding="utf-8") as lines:
            for step, epoch, row in zip(steps, epochs, values.tolist(), strict=True):
                lines.write((self._report % tuple(row)).replace(_WHEN, f"{step},{epoch}"))

    def close(self) -> None:
        """Nothing is open."""


class _Parquet:
    def __init__(self, path: Path, columns: Sequence[str], resume: bool):
        import pyarrow
        from pyarrow import parquet

        self._columns, self._pyarrow = columns, pyarrow
        kinds = [pyarrow.int64()] * 2 + [pyarrow.string()] * (len(columns) - 3) + [pyarrow.float64()]
        self._schema = pyarrow.schema(list(zip(columns, kinds, strict=True)))
        before = parquet.read_table(path) if resume and path.exists() else None
        self._writer = parquet.ParquetWriter(path, self._schema)
        if before is not None:
            self._writer.write_table(before)

    def append(self, steps: Any, epochs: Any, labels: Sequence[tuple[str, ...]], values: np.ndarray) -> None:
        count = len(labels)
        columns = [np.repeat(steps, count), np.repeat(epochs, count)]
        columns += [list(column) * len(values) for column in zip(*labels, strict=True)]
        self._writer.write_table(self._pyarrow.table([*columns, values.ravel()], schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _quoted(values: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()
