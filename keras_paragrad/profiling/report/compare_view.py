"""The report's view of two runs: every figure of both side by side, and the change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from keras_paragrad.profiling.report.formatting import change, milliseconds, number, points, share, size
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

LETTERS = ("A", "B")
_CHARTS = (*THROUGHPUT_CHARTS, *GRADIENT_CHARTS)


@dataclass(frozen=True)
class Pair:
    """A figure of both runs, and its change from the first to the second."""

    name: str
    values: tuple[str, str]
    change: str


def newest_window(run: Run) -> ProfiledWindow | None:
    """The last window of a run that has steps, of the first worker if there are several; or `None`."""
    with_steps = [window for window in run.windows if window.summary.steps]
    first = min((window.summary.run.worker for window in with_steps), default=0)
    return next((window for window in reversed(with_steps) if window.summary.run.worker == first), None)


def newest_summary(run: Run) -> ProfileSummary:
    """The summary of that window, or an empty one."""
    window = newest_window(run)
    return window.summary if window else ProfileSummary()


def main_pairs(runs: Sequence[Run]) -> tuple[Pair, ...]:
    """Step times, shares, memory and speed."""
    figures = [figures_of(newest_summary(run).steps) for run in runs]
    pairs = [
        _pair("Step time, median", [each and each.median for each in figures], milliseconds),
        _pair("Step time, 95th percentile", [each and each.p95 for each in figures], milliseconds),
        *(
            _pair(f"Share: {PART_NAMES[part]}", [each and each.shares[part] for each in figures], share)
            for part in PARTS
        ),
    ]
    peaks = [newest_summary(run).peak_memory for run in runs]
    devices = dict.fromkeys(device for peak in peaks for device in peak)
    pairs += [_pair(f"Peak memory: {device}", [peak.get(device) for peak in peaks], size) for device in devices]
    for spec in _CHARTS:
        pairs += [
            _pair(
                f"{spec.title}: {name} (median)" if len(spec.quantities) > 1 else f"{spec.title} (median)",
                [median_of((*run.telemetry, *run.throughput), quantity) for run in runs],
                spec.formatter,
            )
            for quantity, name in spec.quantities.items()
        ]
    return tuple(pair for pair in pairs if set(pair.values) != {"n/a"})


def operation_pairs(runs: Sequence[Run]) -> tuple[Pair, ...]:
    """The operations that take longest in either run, in milliseconds per step."""
    summaries = [newest_summary(run) for run in runs]
    times = [{each.name: summary.per_step(each) for each in summary.operations} for summary in summaries]
    names = sorted(
        {name for time in times for name in time}, key=lambda name: -max(time.get(name, 0.0) for time in times)
    )
    return tuple(
        _pair(shorten(name), [time.get(name) for time in times], milliseconds) for name in names[:MOST_OPERATIONS]
    )


def layer_pairs(runs: Sequence[Run]) -> tuple[tuple[str, tuple[Pair, ...]], ...]:
    """The median per layer of each quantity."""
    by_title = []
    for quantity, title in LAYER_QUANTITIES.items():
        layers = dict.fromkeys(
            each.name for run in runs for each in run.telemetry if each.quantity == quantity and each.name
        )
        pairs = tuple(
            _pair(layer, [median_of(run.telemetry, quantity, layer) for run in runs], number)
            for layer in list(layers)[:MOST_LAYERS]
        )
        if pairs:
            by_title.append((title, pairs))
    return tuple(by_title)


def combined_charts(runs: Sequence[Run]) -> tuple[LineChart, ...]:
    """The whole-model quantities of both runs in the same charts."""
    charts = []
    for spec in _CHARTS:
        series = [
            replace(each, name=f"{letter}: {spec.quantities[each.quantity]}")
            for letter, run in zip(LETTERS, runs, strict=True)
            for each in (*run.telemetry, *run.throughput)
            if each.quantity in spec.quantities and not each.name
        ]
        if chart := spec.draw(series):
            charts.append(chart)
    return tuple(charts)


def _pair(name: str, values: Sequence[float | None], formatter: Callable[[float | None], str]) -> Pair:
    before, after = values
    changed = points(before, after) if formatter is share else change(before, after)
    return Pair(name, (formatter(before), formatter(after)), changed)
