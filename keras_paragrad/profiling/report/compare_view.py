"""The report's view of several runs: their figures side by side, with the changes from the first."""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from keras_paragrad.profiling.report.formatting import UNKNOWN, change, milliseconds, number, points, share, size
from keras_paragrad.profiling.report.lines import LineChart
from keras_paragrad.profiling.report.runs import ProfiledWindow, Run
from keras_paragrad.profiling.report.series_view import (
    GRADIENT_CHARTS,
    LAYER_QUANTITIES,
    MOST_LAYERS,
    THROUGHPUT_CHARTS,
    median_of,
)
from keras_paragrad.profiling.report.step_chart import PART_NAMES, figures_of
from keras_paragrad.profiling.report.window_view import MOST_OPERATIONS, shorten
from keras_paragrad.profiling.summary import PARTS, ProfileSummary

# The most lines of one quantity that colours and dashes distinguish.
MOST_RUNS = 25
LETTERS = string.ascii_uppercase[:MOST_RUNS]
_CHARTS = (*THROUGHPUT_CHARTS, *GRADIENT_CHARTS)


@dataclass(frozen=True)
class Row:
    """A figure of every run, and its changes from the first run to each other run."""

    name: str
    values: tuple[str, ...]
    changes: tuple[str, ...]


def newest_window(run: Run) -> ProfiledWindow | None:
    """The last window of a run that has steps, of the first worker if there are several; or `None`."""
    with_steps = [window for window in run.windows if window.summary.steps]
    first = min((window.summary.run.worker for window in with_steps), default=0)
    return next((window for window in reversed(with_steps) if window.summary.run.worker == first), None)


def newest_summary(run: Run) -> ProfileSummary:
    """The summary of the newest window, or an empty one."""
    window = newest_window(run)
    return window.summary if window else ProfileSummary()


def main_rows(runs: Sequence[Run]) -> tuple[Row, ...]:
    """Rows of step times, shares, memory and speed."""
    figures = [figures_of(newest_summary(run).steps) for run in runs]
    rows = [
        _row("Step time, median", [figure and figure.median for figure in figures], milliseconds),
        _row("Step time, 95th percentile", [figure and figure.p95 for figure in figures], milliseconds),
        *(
            _row(f"Share: {PART_NAMES[part]}", [figure and figure.shares[part] for figure in figures], share)
            for part in PARTS
        ),
    ]
    hidden = [newest_summary(run).communication for run in runs]
    rows.append(_row("Collectives hidden behind computing", [time and time.share for time in hidden], share))
    peaks = [newest_summary(run).peak_memory for run in runs]
    devices = dict.fromkeys(device for peak in peaks for device in peak)
    rows += [_row(f"Peak memory: {device}", [peak.get(device) for peak in peaks], size) for device in devices]
    held = [{use.name: max(use.values) for use in newest_summary(run).memory if use.values} for run in runs]
    # The process's memory is among the peaks.
    allocators = [name for name in dict.fromkeys(name for sizes in held for name in sizes) if name != "host"]
    rows += [_row(f"Most memory held: {name}", [sizes.get(name) for sizes in held], size) for name in allocators]
    for spec in _CHARTS:
        rows += [
            _row(
                f"{spec.title}: {name} (median)" if len(spec.quantities) > 1 else f"{spec.title} (median)",
                [median_of((*run.telemetry, *run.throughput), quantity) for run in runs],
                spec.formatter,
            )
            for quantity, name in spec.quantities.items()
        ]
    # Leaves out figures that are unknown, or shares of 0, in all runs.
    return tuple(row for row in rows if not set(row.values) <= {UNKNOWN, share(0.0)})


def operation_rows(runs: Sequence[Run]) -> tuple[Row, ...]:
    """Rows of the operations that take longest in any run, in milliseconds per batch."""
    summaries = [newest_summary(run) for run in runs]
    times = [{operation.name: summary.per_step(operation) for operation in summary.operations} for summary in summaries]
    names = _by_longest(times)
    return tuple(
        _row(shorten(name), [time.get(name) for time in times], milliseconds) for name in names[:MOST_OPERATIONS]
    )


def layer_time_rows(runs: Sequence[Run]) -> tuple[Row, ...]:
    """Rows of the layers that take longest in any run, in milliseconds per batch."""
    summaries = [newest_summary(run) for run in runs]
    times = [{layer.name: layer.total / (len(summary.steps) or 1) for layer in summary.layers} for summary in summaries]
    names = _by_longest(times)
    return tuple(_row(name, [time.get(name) for time in times], milliseconds) for name in names[:MOST_LAYERS])


def layer_rows(runs: Sequence[Run]) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """For each quantity recorded per layer: its title, and a row of medians for each layer."""
    by_title = []
    for quantity, title in LAYER_QUANTITIES.items():
        layers = dict.fromkeys(
            record.name for run in runs for record in run.telemetry if record.quantity == quantity and record.name
        )
        rows = tuple(
            _row(layer, [median_of(run.telemetry, quantity, layer) for run in runs], number)
            for layer in list(layers)[:MOST_LAYERS]
        )
        if rows:
            by_title.append((title, rows))
    return tuple(by_title)


def combined_charts(runs: Sequence[Run]) -> tuple[LineChart, ...]:
    """Charts of whole-model quantities for all runs; for more than two runs, one chart for each quantity."""
    specs = _CHARTS if len(runs) == 2 else [single for spec in _CHARTS for single in spec.singles]
    charts = []
    for spec in specs:
        series = [
            replace(record, name=f"{letter}: {spec.quantities[record.quantity]}")
            for letter, run in zip(LETTERS, runs, strict=False)
            for record in (*run.telemetry, *run.throughput)
            if record.quantity in spec.quantities and not record.name
        ]
        if chart := spec.draw(series):
            charts.append(chart)
    return tuple(charts)


def _by_longest(times: Sequence[Mapping[str, float]]) -> list[str]:
    """All names, in descending order of their longest time."""
    return sorted(
        {name for time in times for name in time}, key=lambda name: -max(time.get(name, 0.0) for time in times)
    )


def _row(name: str, values: Sequence[float | None], formatter: Callable[[float | None], str]) -> Row:
    """A row of one value per run; shares change by percentage points, others by percent."""
    before, *others = values
    changed = points if formatter is share else change
    return Row(name, tuple(map(formatter, values)), tuple(changed(before, after) for after in others))
