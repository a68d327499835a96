"""Values in long format, one per row, in a CSV or a Parquet file."""

import contextlib
import csv
import io
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Placeholder for the step and the epoch in a report's lines; never part of a label.
_WHEN = "\0"


class Table:
    """A file with the columns `step`, `epoch`, custom labels and `value`.

    A CSV file is complete after every `append`. A Parquet file replaces its predecessor on `close`.
    Values have twelve digits in CSV.

    Args:
        path: The file; its suffix, `.csv` or `.parquet`, gives the format.
        labels: The names of the columns between `epoch` and `value`.
        resume: Whether to append to an existing file.

    Raises:
        FileExistsError: There is a file in its place that has other columns.
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
        begin_csv(path, columns, resume)
        self._of: Sequence[tuple[str, ...]] = ()
        self._report = ""

    def append(self, steps: Any, epochs: Any, labels: Sequence[tuple[str, ...]], values: np.ndarray) -> None:
        if labels is not self._of:
            # Nine digits distinguish any two 32-bit floats; all seventeen take three times as long.
            lines = [_quoted(label).replace("%", "%%") for label in labels]
            self._of, self._report = labels, "".join(f"{_WHEN},{line},%.12g\n" for line in lines)
        # Opened each time: an aborted training leaves no file open.
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
        before = self._before(path)
        # Parquet can't be appended to: a process killed while writing a new file leaves the previous one intact.
        partial = path.with_name(f"{path.name}.partial")
        if partial.exists():
            with partial.open("rb") as file:
                _check_ours(file.read(4) in (b"", b"PAR1"), partial)
        self._writer = parquet.ParquetWriter(partial, self._schema)
        # Also if an aborted `fit` never closes it.
        self._end = weakref.finalize(self, _finish, self._writer, partial, path)
        if resume and before is not None:
            self._writer.write_table(before)

    def append(self, steps: Any, epochs: Any, labels: Sequence[tuple[str, ...]], values: np.ndarray) -> None:
        count = len(labels)
        columns = [np.repeat(steps, count), np.repeat(epochs, count)]
        columns += [list(column) * len(values) for column in zip(*labels, strict=True)]
        self._writer.write_table(self._pyarrow.table([*columns, values.ravel()], schema=self._schema))

    def close(self) -> None:
        self._end()

    def _before(self, path: Path) -> Any:
        from pyarrow import parquet

        if not path.exists():
            return None
        before = None
        with contextlib.suppress(self._pyarrow.ArrowInvalid):
            before = parquet.read_table(path)
        _check_ours(before is not None and before.schema.equals(self._schema), path)
        return before


def _finish(writer: Any, partial: Path, path: Path) -> None:
    writer.close()
    partial.replace(path)


def begin_csv(path: Path, columns: Sequence[str], resume: bool) -> None:
    """Starts a CSV file with its header, or keeps one that already has it.

    Args:
        path: The file.
        columns: The header.
        resume: Whether to keep the rows of a file with these columns.

    Raises:
        FileExistsError: There is a file in its place that has other columns.
    """
    header = f"{_quoted(columns)}\n"
    if path.exists():
        with path.open("rb") as file:
            found = file.read(len(header.encode()))
        _check_ours(found in (b"", header.encode()), path)
        if resume and found:
            return
    path.write_text(header, encoding="utf-8", newline="")


def _check_ours(ours: bool, path: Path) -> None:
    if not ours:
        raise FileExistsError(
            f"{path} already exists with other columns, and was not changed. Give the callback its own log_dir"
        )


def _quoted(values: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()
