"""Reads a log directory: its trace windows, and the per-step records of telemetry, throughput and retraces."""

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keras_paragrad.plain_text import read_json
from keras_paragrad.profiling.summary import ProfileSummary, RunInfo

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


def read_run(folder: Path) -> Run:
    """Reads a log directory, or a folder of traces in it."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "doesn't exist"
        raise FileNotFoundError(f"{folder} {problem}. Pass the log_dir of Profiler.")
    notes: list[str] = []
    windows = _windows(folder, notes)
    found: dict[str, tuple[Series, ...]] = {"telemetry": (), "throughput": ()}
    for name in found:
        try:
            found[name] = read_series(folder, name)
        except (OSError, ValueError) as error:
            notes.append(f"{name} can't be read ({type(error).__name__}: {error}).")
    if not windows and not any(found.values()):
        raise FileNotFoundError(
            f"There is nothing in {folder} to report on. {' '.join(notes)}"
            if notes
            else f"There is no trace in {folder}: no file {TRACES} in it or in a folder below, nor telemetry.csv or "
            "throughput.csv. Train with callbacks=[Profiler(log_dir)], or pass the log_dir that it was given."
        )
    try:
        info = RunInfo.from_dict(read_json((folder / "run.json").read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        info = windows[-1].summary.run if windows else RunInfo()
    retraces, count = read_retraces(folder)
    telemetry, throughput = drop_uninformative(found["telemetry"]), found["throughput"]
    return Run(folder.resolve().name, info, windows, telemetry, throughput, retraces, count, tuple(notes))


def _windows(folder: Path, notes: list[str]) -> tuple[ProfiledWindow, ...]:
    """The newest windows, oldest first; analyses the newest traces without a summary. Adds notes on what is missing."""
    found = sorted({path.parent for pattern in (TRACES, SUMMARY) for path in folder.rglob(pattern)})
    # A window still being traced, or whose run was killed, is in a hidden folder.
    traces = [trace for trace in found if not any(part.startswith(".") for part in trace.relative_to(folder).parts)]
    names = {trace: trace.relative_to(folder).as_posix() for trace in traces}
    runs = sorted({name.partition(PROFILES)[0] or "./" for name in names.values()})
    if len(runs) > 1:
        listed = ", ".join(runs[:MOST_ANALYSED]) + (" and more" if len(runs) > MOST_ANALYSED else "")
        notes.append(f"There are several runs: {listed}. To see the telemetry of one, pass its folder.")
    if len(traces) > MOST_WINDOWS:
        notes.append(f"There are {len(traces)} traces; the {MOST_WINDOWS} newest are shown.")
    traces = traces[-MOST_WINDOWS:]
    unsummarized = [trace for trace in traces if not (trace / SUMMARY).exists()]
    if len(unsummarized) > MOST_ANALYSED:
        notes.append(
            f"{len(unsummarized)} traces have no summary beside them; the {MOST_ANALYSED} newest of these are shown."
        )
    analysed = [trace for trace in traces if trace not in unsummarized[:-MOST_ANALYSED]]
    windows = [(names[trace].removeprefix(PROFILES), _summary(trace, notes)) for trace in analysed]
    return tuple(ProfiledWindow(name, summary) for name, summary in windows if summary)


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


def read_series(folder: Path, name: str) -> tuple[Series, ...]:
    """All series of `<name>.csv` in a folder, by quantity and name; none without the file.

    Incomplete rows, such as the last one of a killed run, are skipped. Of two values for one step, as written by a run
    that resumed from a checkpoint, the later one counts.
    """
    # By quantity, name and variable, the value of each step.
    columns: dict[tuple[str, str, str], dict[float, float]] = defaultdict(dict)
    for row in _csv_rows(folder / f"{name}.csv"):
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
        for row in _csv_rows(folder / "retraces.csv")
    )
    whole = [row for row in rows if all(row)]
    return whole[-MOST_RETRACES:], len(whole)


def _csv_rows(path: Path) -> Iterator[Mapping[str, str]]:
    """The rows of a file; none without it."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace", newline="") as lines:
        # A full disk can leave zero bytes behind.
        yield from csv.DictReader(line.replace("\0", "") for line in lines)
