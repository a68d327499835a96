"""Compares two runs: every figure of both side by side, and the change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_paragrad.profiling.report.figures import IN_WORDS, PARTS, figures_of
from keras_paragrad.profiling.report.lines import LineChart, named
from keras_paragrad.profiling.report.runs import ProfiledWindow, Run
from keras_paragrad.profiling.report.series_view import (
    GRADIENT_CHARTS,
    LAYER_QUANTITIES,
    MOST_LAYERS,
    THROUGHPUT_CHARTS,
    chart_of,
    median_of,
)
from keras_paragrad.profiling.report.units import change, milliseconds, number, points, share, size
from keras_paragrad.profiling.report.window_view import MOST_OPERATIONS, shortened
from keras_paragrad.profiling.summary import ProfileSummary

LETTERS = ("A", "B")
CHARTS = (*THROUGHPUT_CHARTS, *GRADIENT_CHARTS)


@dataclass(frozen=True)
class Pair:
    """One figure of two runs.

    Attributes:
        name: What it is.
        values: Its value in each run.
        change: The change from the first run to the second.
    """

    name: str
    values: tuple[str, str]
    change: str


def newest_window(run: Run) -> ProfiledWindow | None:
    """The last window of a run that has steps, of the first worker if there are several; or `None`."""
    with_steps = [window for window in run.windows if window.summary.steps]
    first = min((window.summary.run.worker for window in with_steps), default=0)
    return next((window for window in reversed(with_steps) if window.summary.run.worker == first), None)


def newest(run: Run) -> ProfileSummary:
    """The summary of that window, or an empty one."""
    window = newest_window(run)
    return window.summary if window else ProfileSummary()


def main_pairs(runs: Sequence[Run]) -> tuple[Pair, ...]:
    """Step times, shares, memory and speed."""
    found = [figures_of(newest(run).steps) for run in runs]
    pairs = [
        _pair("Step time, median", [one and one.median for one in found], milliseconds),
        _pair("Step time, 95th percentile", [one and one.p95 for one in found], milliseconds),
        *(_pair(f"Share: {IN_WORDS[part]}", [one and one.shares[part] for one in found], share) for part in PARTS),
    ]
    peaks = [newest(run).peak_memory for run in runs]
    devices = dict.fromkeys(device for peak in peaks for device in peak)
    pairs += [_pair(f"Peak memory: {device}", [peak.get(device) for peak in peaks], size) for device in devices]
    for drawn in CHARTS:
        pairs += [
            _pair(
                f"{drawn.title}: {words} (median)" if len(drawn.quantities) > 1 else f"{drawn.title} (median)",
                [median_of((*run.telemetry, *run.throughput), quantity) for run in runs],
                drawn.written,
            )
            for quantity, words in drawn.quantities.items()
        ]
    return tuple(pair for pair in pairs if set(pair.values) != {"n/a"})


def operation_pairs(runs: Sequence[Run]) -> tuple[Pair, ...]:
    """The operations that take longest in either run, in milliseconds a step."""
    times = [_milliseconds_a_step(newest(run)) for run in runs]
    names = sorted(
        {name for time in times for name in time}, key=lambda name: -max(time.get(name, 0.0) for time in times)
    )
    return tuple(
        _pair(shortened(name), [time.get(name) for time in times], milliseconds) for name in names[:MOST_OPERATIONS]
    )


def layer_pairs(runs: Sequence[Run]) -> tuple[tuple[str, tuple[Pair, ...]], ...]:
    """The median per layer of each quantity."""
    found = []
    for quantity, title in LAYER_QUANTITIES.items():
        layers = dict.fromkeys(
            one.name for run in runs for one in run.telemetry if one.quantity == quantity and one.name
        )
        pairs = tuple(
            _pair(layer, [median_of(run.telemetry, quantity, layer) for run in runs], number)
            for layer in list(layers)[:MOST_LAYERS]
        )
        found.append((title, pairs))
    return tuple((title, pairs) for title, pairs in found if pairs)


def both_charts(runs: Sequence[Run]) -> tuple[LineChart, ...]:
    """The whole-model quantities of both runs in the same charts."""
    charts = []
    for drawn in CHARTS:
        series = [
            named(one, f"{letter}: {drawn.quantities[one.quantity]}")
            for letter, run in zip(LETTERS, runs, strict=True)
            for one in (*run.telemetry, *run.throughput)
            if one.quantity in drawn.quantities and not one.name
        ]
        charts.append(chart_of(drawn, series))
    return tuple(chart for chart in charts if chart)


def _pair(name: str, values: Sequence[float | None], written: Callable[[float | None], str]) -> Pair:
    before, after = values
    changed = points(before, after) if written is share else change(before, after)
    return Pair(name, (written(before), written(after)), changed)


def _milliseconds_a_step(summary: ProfileSummary) -> dict[str, float]:
    return {operation.name: summary.per_step(operation) for operation in summary.operations}
