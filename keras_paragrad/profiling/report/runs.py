"""Reads a log directory: the trace windows and the per-step records."""

from dataclasses import dataclass
from pathlib import Path

from keras_paragrad.plain_json import read_json
from keras_paragrad.profiling.report.records import Retrace, Series, read_retraces, read_series, worth_showing
from keras_paragrad.profiling.summary import ProfileSummary, RunInfo

TRACES = "*.xplane.pb"
SUMMARIES = "keras_paragrad*.json"
WHERE_TENSORBOARD_LOOKS = "plugins/profile/"
# Traces of other programs are analysed for the report, which can take seconds each.
MOST_ANALYSED = 4
MOST_WINDOWS = 40


@dataclass(frozen=True)
class ProfiledWindow:
    """A part of a run that was traced.

    Attributes:
        name: Its folder, relative to the log directory, with the summary's file if there are several.
        summary: Its summary.
    """

    name: str
    summary: ProfileSummary


@dataclass(frozen=True)
class Run:
    """A log directory.

    Attributes:
        name: What to call it.
        info: What was run.
        windows: What was traced, in order.
        telemetry: Norms, ratios and counts.
        throughput: Speeds, times and sizes.
        retraces: The last retraces.
        retrace_count: The total number of retraces.
        notes: What couldn't be read, and what was left out.
    """

    name: str
    info: RunInfo
    windows: tuple[ProfiledWindow, ...]
    telemetry: tuple[Series, ...]
    throughput: tuple[Series, ...]
    retraces: tuple[Retrace, ...]
    retrace_count: int
    notes: tuple[str, ...]


def read_run(folder: Path) -> Run:
    """Reads a log directory.

    Args:
        folder: The log directory, or a folder of traces in it.

    Raises:
        FileNotFoundError: The folder doesn't exist, or holds nothing that a report could show.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "doesn't exist"
        raise FileNotFoundError(f"{folder} {what}. Pass the log_dir of Profiler.")
    notes: list[str] = []
    windows = _windows(folder, notes)
    telemetry, throughput = (_series(folder, name, notes) for name in ("telemetry", "throughput"))
    if not windows and not telemetry and not throughput:
        raise FileNotFoundError(_nothing_found(folder, notes))
    retraces, retrace_count = read_retraces(folder)
    name = folder.resolve().name
    info = _run_info(folder, windows)
    return Run(name, info, windows, worth_showing(telemetry), throughput, retraces, retrace_count, tuple(notes))


def _nothing_found(folder: Path, notes: list[str]) -> str:
    if notes:
        return f"There is nothing in {folder} to report on. {' '.join(notes)}"
    return (
        f"There is no trace in {folder}: no file {TRACES} in it or in a folder below, nor telemetry.csv or "
        "throughput.csv. Train with callbacks=[Profiler(log_dir)], or pass the log_dir that it was given."
    )


def _windows(folder: Path, notes: list[str]) -> tuple[ProfiledWindow, ...]:
    """The newest windows, oldest first. Those without a summary of ours are analysed, unless they are many."""
    found = sorted({path.parent for pattern in (TRACES, SUMMARIES) for path in folder.rglob(pattern)})
    # A window still being traced, or whose run was killed, is in a hidden folder.
    found = [trace for trace in found if not any(part.startswith(".") for part in trace.relative_to(folder).parts)]
    roots = sorted({_root(trace, folder) for trace in found})
    if len(roots) > 1:
        notes.append(f"There are several runs: {_some(roots)}. To see the telemetry of one, pass its folder.")
    if len(found) > MOST_WINDOWS:
        notes.append(f"There are {len(found)} traces; the {MOST_WINDOWS} newest are shown.")
    windows: list[ProfiledWindow] = []
    foreign = 0
    for trace in reversed(found[-MOST_WINDOWS:]):
        summaries = _own_summaries(trace, notes)
        if not summaries and any(trace.glob(TRACES)):
            foreign += 1
            summaries = _analysed(trace, notes) if foreign <= MOST_ANALYSED else {}
        name = "" if trace == folder else trace.relative_to(folder).as_posix().removeprefix(WHERE_TENSORBOARD_LOOKS)
        several = len(summaries) > 1
        windows += [
            ProfiledWindow(_joined(name, file if several else ""), summary) for file, summary in summaries.items()
        ]
    if foreign > MOST_ANALYSED:
        notes.append(f"{foreign} traces have no summary beside them; the {MOST_ANALYSED} newest of these are shown.")
    return tuple(reversed(windows))


def _root(trace: Path, folder: Path) -> str:
    """The log directory that a trace is in, relative to a folder around it."""
    return trace.relative_to(folder).as_posix().partition(WHERE_TENSORBOARD_LOOKS)[0] or "./"


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_ANALYSED]) + (" and more" if len(names) > MOST_ANALYSED else "")


def _joined(folder: str, file: str) -> str:
    return " ".join(part for part in (folder, file) if part) or "."


def _own_summaries(trace: Path, notes: list[str]) -> dict[str, ProfileSummary]:
    """The summaries beside a trace by file, the last worker's first."""
    found: dict[str, ProfileSummary] = {}
    for path in sorted(trace.glob(SUMMARIES), reverse=True):
        try:
            found[path.name] = ProfileSummary.from_dict(read_json(path.read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"{path.name} in {trace.name} can't be read ({type(error).__name__}: {error}).")
    return found


def _analysed(trace: Path, notes: list[str]) -> dict[str, ProfileSummary]:
    from keras_paragrad.profiling.analysis import summarize

    try:
        return {"": summarize(trace)}
    # A trace can be broken in any way; the rest of the run is still shown.
    except Exception as error:
        notes.append(f"The trace {trace.name} can't be analysed ({type(error).__name__}: {error}).")
        return {}


def _series(folder: Path, name: str, notes: list[str]) -> tuple[Series, ...]:
    try:
        return read_series(folder, name)
    # A Parquet file of a run that is still running, or was killed, has no footer.
    except (OSError, ValueError) as error:
        notes.append(
            f"{name} can't be read: it is damaged, or its run has not ended ({type(error).__name__}: {error})."
        )
        return ()


def _run_info(folder: Path, windows: tuple[ProfiledWindow, ...]) -> RunInfo:
    """From `run.json`, or else from the newest window."""
    try:
        return RunInfo.from_dict(read_json((folder / "run.json").read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return windows[-1].summary.run if windows else RunInfo()
