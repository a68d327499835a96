"""Reads a log directory: its trace windows, and the per-step records of telemetry, throughput and retraces."""

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keras_paragrad.extras import require
from keras_paragrad.plain_text import read_json
from keras_paragrad.profiling.summary import WORKER_FILES, ProfileSummary, RunInfo

TRACES = "*.xplane.pb"
SUMMARY = "keras_paragrad.json"
PROFILES = "plugins/profile/"
# Traces without a summary must be analysed, which can take seconds each.
MOST_ANALYSED = 4
MOST_WINDOWS = 40
MOST_RETRACES = 50


@dataclass(frozen=True)
class ProfiledWindow:
    """A traced window, a range of batches, named by its folder."""

    name: str
    summary: ProfileSummary


@dataclass(frozen=True)
class Series:
    """A quantity over the steps."""

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
class WorkerBatches:
    """The batches of one worker in a window."""

    worker: int
    batches: np.ndarray
    milliseconds: np.ndarray
    waiting: np.ndarray

    @property
    def own(self) -> np.ndarray:
        """How long its own work took in each batch."""
        return np.maximum(self.milliseconds - self.waiting, 0.0)


@dataclass(frozen=True)
class Run:
    """The contents of a log directory: windows in order, records, the last retraces, and notes on what is missing.

    A retrace is its step, the function, and the signature of shapes.
    """

    name: str
    info: RunInfo
    windows: tuple[ProfiledWindow, ...]
    telemetry: tuple[Series, ...]
    throughput: tuple[Series, ...]
    retraces: Sequence[tuple[str, ...]]
    retrace_count: int
    notes: tuple[str, ...]
    workers: tuple[WorkerBatches, ...] = ()


def read_run(folder: Path) -> Run:
    """Reads a log directory, or a folder of traces in it."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "doesn't exist"
        raise FileNotFoundError(f"{folder} {problem}. Pass the log_dir of Profiler.")
    notes: list[str] = []
    windows = _windows(folder, notes)
    telemetry, throughput = (_series(folder, name, notes) for name in ("telemetry", "throughput"))
    if not windows and not telemetry and not throughput:
        raise FileNotFoundError(_nothing_to_report(folder, notes))
    retraces, retrace_count = read_retraces(folder)
    name = folder.resolve().name
    info = _run_info(folder, windows)
    workers = read_workers(folder, info.workers)
    if 0 < len(workers) < info.workers:
        notes.append(
            f"There are files of {len(workers)} of {info.workers} workers. Copy {WORKER_FILES} of all to {folder}."
        )
    telemetry = drop_uninformative(telemetry)
    return Run(name, info, windows, telemetry, throughput, retraces, retrace_count, tuple(notes), workers)


def _nothing_to_report(folder: Path, notes: list[str]) -> str:
    """The error for a folder without anything to report on."""
    if notes:
        return f"There is nothing in {folder} to report on. {' '.join(notes)}"
    return (
        f"There is no trace in {folder}: no file {TRACES} in it or in a folder below, nor telemetry.csv or "
        "throughput.csv. Train with callbacks=[Profiler(log_dir)], or pass the log_dir that it was given."
    )


def _windows(folder: Path, notes: list[str]) -> tuple[ProfiledWindow, ...]:
    """The newest windows, oldest first; analyses the newest traces without a summary. Adds notes on what is missing."""
    found = sorted({path.parent for pattern in (TRACES, SUMMARY) for path in folder.rglob(pattern)})
    # A window still being traced, or whose run was killed, is in a hidden folder.
    traces = [trace for trace in found if not any(part.startswith(".") for part in trace.relative_to(folder).parts)]
    runs = sorted({_relative(trace, folder).partition(PROFILES)[0] or "./" for trace in traces})
    if len(runs) > 1:
        names = ", ".join(runs[:MOST_ANALYSED]) + (" and more" if len(runs) > MOST_ANALYSED else "")
        notes.append(f"There are several runs: {names}. To see the telemetry of one, pass its folder.")
    if len(traces) > MOST_WINDOWS:
        notes.append(f"There are {len(traces)} traces; the {MOST_WINDOWS} newest are shown.")
    traces = traces[-MOST_WINDOWS:]
    unsummarized = [trace for trace in traces if not (trace / SUMMARY).exists()]
    if len(unsummarized) > MOST_ANALYSED:
        notes.append(
            f"{len(unsummarized)} traces have no summary beside them; the {MOST_ANALYSED} newest of these are shown."
        )
    left_out = unsummarized[:-MOST_ANALYSED]
    summaries = {trace: _summary(trace, notes) for trace in traces if trace not in left_out}
    names = {trace: _relative(trace, folder).removeprefix(PROFILES) for trace in summaries}
    return tuple(ProfiledWindow(names[trace], summary) for trace, summary in summaries.items() if summary)


def _relative(trace: Path, folder: Path) -> str:
    return trace.relative_to(folder).as_posix()


def _summary(trace: Path, notes: list[str]) -> ProfileSummary | None:
    """The summary beside a trace, or what its analysis finds; `None`, with a note, if it can't be read."""
    try:
        return ProfileSummary.from_dict(read_json((trace / SUMMARY).read_text("utf-8")))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes.append(f"{SUMMARY} in {trace.name} can't be read ({type(error).__name__}: {error}).")
        return None
    from keras_paragrad.profiling.analysis import summarize

    try:
        return summarize(trace)
    # A trace can be damaged in any way; the rest of the run is still shown.
    except Exception as error:
        notes.append(f"The trace {trace.name} can't be analysed ({type(error).__name__}: {error}).")
        return None


def _series(folder: Path, name: str, notes: list[str]) -> tuple[Series, ...]:
    """The series of a file; adds a note if it can't be read."""
    try:
        return read_series(folder, name)
    # A Parquet file of a run that is still running, or was killed, has no footer.
    except (OSError, ValueError) as error:
        notes.append(
            f"{name} can't be read: it is damaged, or its run has not ended ({type(error).__name__}: {error})."
        )
        return ()


def _run_info(folder: Path, windows: tuple[ProfiledWindow, ...]) -> RunInfo:
    """The run's description, from `run.json` or else from the newest window."""
    try:
        return RunInfo.from_dict(read_json((folder / "run.json").read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return windows[-1].summary.run if windows else RunInfo()


def read_series(folder: Path, name: str) -> tuple[Series, ...]:
    """All series of `<name>.csv`, or of `<name>.parquet`, in a folder, by quantity and name; none without the file.

    Incomplete rows, such as the last one of a killed run, are skipped. Of two values for one step, as written by a run
    that resumed from a checkpoint, the later one counts.
    """
    # By quantity, name and variable, the value of each step.
    columns: dict[tuple[str, str, str], dict[float, float]] = defaultdict(dict)
    for row in _rows(folder, name):
        try:
            step, value = float(row["step"]), float(row["value"])
            variable = row.get("variable") or ""
            key = str(row["quantity"]), "/".join(part for part in (row.get("layer"), variable) if part), variable
        except (KeyError, TypeError, ValueError):
            continue
        # Otherwise the row is truncated, or belongs to another file.
        if math.isfinite(step):
            columns[key][step] = value
    return tuple(Series(*key, *np.array(sorted(found.items())).T) for key, found in columns.items())


def read_workers(folder: Path, count: int) -> tuple[WorkerBatches, ...]:
    """The batches of a run's workers in the newest window that all of them timed, in order; empty for one worker."""
    files = {worker: folder / WORKER_FILES.replace("*", str(worker)) for worker in range(count)}
    known = {worker: windows for worker, path in files.items() if (windows := _batches_by_window(path))}
    shared = set.intersection(*map(set, known.values())) if known else set()
    if count < 2 or not shared:
        return ()
    rows = {worker: windows[max(shared)] for worker, windows in known.items()}
    batches = sorted(set.intersection(*map(set, rows.values())))
    return tuple(
        WorkerBatches(worker, np.array(batches), *np.array([found[batch] for batch in batches]).T)
        for worker, found in rows.items()
        if batches
    )


def _batches_by_window(path: Path) -> dict[float, dict[float, tuple[float, float]]]:
    """By window and batch, in milliseconds, how long the batch took and how long it waited; skips incomplete rows."""
    windows: dict[float, dict[float, tuple[float, float]]] = defaultdict(dict)
    for row in _csv_rows(path) if path.is_file() else ():
        try:
            window, batch, took, waiting = (float(row[name]) for name in ("window", "batch", "milliseconds", "waiting"))
        except (KeyError, TypeError, ValueError):
            continue
        windows[window][batch] = took, waiting
    return windows


def drop_uninformative(series: Sequence[Series]) -> tuple[Series, ...]:
    """Drops the norms after clipping where nothing was clipped, and a loss scale that is always 1."""
    before = {record.name: record for record in series if record.quantity == "gradient_norm"}

    def is_uninformative(record: Series) -> bool:
        if record.quantity == "clipped_gradient_norm" and record.name in before:
            return np.array_equal(record.values, before[record.name].values, equal_nan=True)
        return record.quantity == "loss_scale" and bool((record.values == 1).all())

    return tuple(record for record in series if not is_uninformative(record))


def read_retraces(folder: Path) -> tuple[list[tuple[str, ...]], int]:
    """The last retraces of a run, and their total number."""
    rows = (
        tuple(row.get(column) or "" for column in ("step", "function", "signature"))
        for row in _rows(folder, "retraces")
    )
    whole = [row for row in rows if all(row)]
    return whole[-MOST_RETRACES:], len(whole)


def _rows(folder: Path, name: str) -> Iterable[Mapping[str, str]]:
    """The rows of `<name>.csv` or else of `<name>.parquet`; none without a file."""
    csv_file, parquet = folder / f"{name}.csv", folder / f"{name}.parquet"
    if csv_file.is_file():
        return _csv_rows(csv_file)
    return _parquet_rows(parquet) if parquet.is_file() else ()


def _csv_rows(path: Path) -> Iterator[Mapping[str, str]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as lines:
        # A full disk can leave zero bytes behind.
        yield from csv.DictReader(line.replace("\0", "") for line in lines)


def _parquet_rows(path: Path) -> Iterator[Mapping[str, str]]:
    """The rows of a Parquet file."""
    require(f"Reading {path}", "pyarrow")
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
