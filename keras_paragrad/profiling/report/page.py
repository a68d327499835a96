"""What a report shows, as plain data: `templates/report.js` writes it in words and draws it.

A block is a dictionary with its `type`, which says how it is drawn. In a text, a pair is a number and its unit.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from keras_paragrad.profiling.report.lines import (
    MOST_LINES,
    Block,
    Chart,
    by_layer,
    line_chart,
    model_charts,
    select_points,
)
from keras_paragrad.profiling.report.runs import ProfiledWindow, Run, Series
from keras_paragrad.profiling.summary import (
    COLLECTIVES,
    PARTS,
    PASSES,
    VARIANT,
    ProfileSummary,
    RunInfo,
    StepTime,
    shares_of,
)

MOST_BARS = 60
MOST_DETAILED = 3
MOST_OPERATIONS, MOST_KINDS = 15, 12
MOST_TIMED_LAYERS, _MOST_LAYER_BARS = 50, 15
# Compiler-generated names can be arbitrarily long.
_LONGEST_NAME = 500
_UNKNOWN = "n/a"

_GRADIENT_CHARTS = (
    Chart(
        "Gradient of the whole model, L2 norm",
        {"gradient_norm": "before clipping", "clipped_gradient_norm": "after clipping"},
        logarithmic=True,
    ),
    Chart("Weights of the whole model, L2 norm", {"weight_norm": "weights"}),
    Chart("Update to weights of the whole model, ratio of L2 norms", {"update_ratio": "ratio"}, logarithmic=True),
    Chart("Values of the whole gradient that are not finite", {"nonfinite": "values"}, "count"),
    Chart("Learning rate", {"learning_rate": "learning rate"}),
    Chart("Loss scale", {"loss_scale": "loss scale"}),
)
_SPEED_CHARTS = (
    Chart("Throughput, examples per second", {"examples_per_second": "examples per second"}),
    Chart("Step time over the run", {"step_time_p50_ms": "median", "step_time_p95_ms": "95th percentile"}, "ms"),
)
_THROUGHPUT_CHARTS = (
    Chart("Memory in use", {"host_memory_bytes": "host", "device_memory_bytes": "device"}, "B"),
    Chart("Share of the peak: model FLOPs utilisation", {"mfu": "utilisation"}, "share"),
)
# Times in seconds that speeds exclude.
_EXCLUDED = {"compile_s": "steps that compiled", "profiler_s": "pauses by Profiler"}
# Quantities whose last value alone matters: their names, units, and what they are multiplied with.
_LAST_VALUES = {
    "time_to_first_step_s": ("Time to the first step", "ms", 1e3),
    "flops_per_step": ("FLOPs per step", "FLOP", 1),
    "retraces": ("Retraces", "count", 1),
}


def page_of(run: Run) -> Block:
    """The data of the page, to be written as JSON."""
    started = _date(run.info.started)
    sections = (
        ("time", "Where the time goes", _time(run.windows)),
        ("throughput", "Throughput", _throughput(run)),
        ("gradient", "Where the gradient goes", _gradient(run.telemetry)),
        ("run", "The run", [{"type": "facts", "facts": _facts(run.info)}]),
    )
    page = {
        "title": f"Profile of {run.info.model or run.name}",
        "subtitle": f"{run.name}, started {started}" if run.info.started else run.name,
        "headlines": [one for one in _headlines(run) if one[1] is not None],
        "notes": run.notes,
        "sections": [{"id": name, "title": title, "blocks": blocks} for name, title, blocks in sections if blocks],
    }
    return _plain(page)


def _plain(data: Any) -> Any:
    """Data with lists for arrays and tuples, and words for numbers that JSON doesn't have."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, np.ndarray):
        data = data.tolist()
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if math.isnan(data) else "∞" if data > 0 else "−∞"
    return int(data) if isinstance(data, float) and data.is_integer() else data


def _text(*parts: Any, kind: str = "note") -> Block:
    return {"type": "text", "class": kind, "text": parts}


def _table(caption: str, heads: Mapping[str, str], rows: Iterable[Sequence[Any]], kind: str = "", **more: Any) -> Block:
    """A table whose columns have names and units, `""` for text; `meter` is the column drawn below the first."""
    return {"type": "table", "caption": caption, "heads": [*heads.items()], "rows": [*rows], "class": kind, **more}


def _facts(info: RunInfo) -> list[tuple[str, Any]]:
    """The rows of the table that describes a run."""
    if info == RunInfo():
        return [("What was run", "not known: neither run.json nor a summary of ours is there")]
    return [
        ("Model", info.model or _UNKNOWN),
        ("Optimizer", info.optimizer or _UNKNOWN),
        ("Trainable values", f"{info.parameters:,}" if info.parameters else _UNKNOWN),
        ("Strategy", info.strategy or "none"),
        ("Replicas", f"{info.replicas:,}"),
        ("Workers", f"{info.workers:,}"),
        ("Compiled by XLA", "yes" if info.jit else "no"),
        ("Steps per execution", f"{info.steps_per_execution:,}"),
        ("Precision", info.precision),
        ("Devices", ", ".join(info.devices) or _UNKNOWN),
        ("Versions", ", ".join(f"{name} {version}" for name, version in info.versions.items()) or _UNKNOWN),
        ("Started", _date(info.started)),
    ]


def _date(written: str) -> str:
    try:
        return f"{datetime.fromisoformat(written):%Y-%m-%d %H:%M:%S %Z}".strip()
    except ValueError:
        return written or _UNKNOWN


def _headlines(run: Run) -> Iterator[tuple[str, float | None, str]]:
    """The main figures of a run: the name, the value and its unit."""
    # The steps of the last window that has some, of the first worker if there are several.
    with_steps = [window.summary for window in run.windows if window.summary.steps]
    first = min((summary.run.worker for summary in with_steps), default=0)
    newest = next((summary.steps for summary in reversed(with_steps) if summary.run.worker == first), ())
    if figures := _figures(newest):
        yield "Step time, median", figures["median"], "ms"
        yield "Step time, 95th percentile", figures["p95"], "ms"
        yield "Waiting for input", figures["shares"]["input"], "share"
        yield "Computing", figures["shares"]["compute"], "share"
    of_model = {series.quantity: series for series in run.throughput if not series.name}
    for counted in ("examples", "updates"):
        series = of_model.get(f"{counted}_per_second")
        if series and len(series.finite):
            yield f"{counted.capitalize()} per second, median", float(np.median(series.finite)), "number"
    for quantity, (name, unit, scale) in _LAST_VALUES.items():
        if quantity in of_model:
            yield name, float(of_model[quantity].values[-1]) * scale, unit


def _figures(steps: Sequence[StepTime]) -> Block | None:
    """Statistics of a window's step times, in milliseconds, and each part's fraction of the total time."""
    if not steps:
        return None
    median, p95 = np.percentile([step.duration for step in steps], [50, 95]).tolist()
    return {"count": len(steps), "median": median, "p95": p95, "shares": shares_of(steps)}


def _time(windows: Sequence[ProfiledWindow]) -> list[Block]:
    """All windows in a row each, and the newest in detail."""
    if not windows:
        return [
            _text("No part of this run was traced. Give fit a Profiler(log_dir) to see where its time goes.", kind="")
        ]
    blocks: list[Block] = []
    if len(windows) > 1:
        heads = {"window": "", "batches": "count", "median": "ms", "95th percentile": "ms"}
        heads |= dict.fromkeys(PARTS, "share")
        rows = []
        for window in windows:
            found = _figures(window.summary.steps) or {"count": 0, "median": None, "p95": None, "shares": {}}
            shares = [found["shares"].get(part) for part in PARTS]
            rows.append((window.name, found["count"], found["median"], found["p95"], *shares))
        blocks.append(_table("All windows that were traced", heads, rows))
    detailed = [_window(window) for window in reversed(windows[-MOST_DETAILED:])]
    if len(detailed) < len(windows):
        blocks.append(_text(f"The {len(detailed)} newest of {len(windows)} windows follow in detail."))
    return blocks + detailed


def _window(window: ProfiledWindow) -> Block:
    """A window in detail."""
    summary, blocks = window.summary, []
    figures, batches = _figures(summary.steps), len(summary.steps) or 1
    if summary.advice:
        blocks.append({"type": "advice", "text": [summary.advice.text], "evidence": [summary.advice.evidence]})
    if figures:
        chosen = select_points(np.array([step.duration for step in summary.steps]), MOST_BARS)
        steps = [summary.steps[index] for index in chosen]
        rows = [(one.step, one.update, one.duration, *(getattr(one, part) for part in PARTS)) for one in steps]
        blocks.append({"type": "shares", "shares": figures["shares"]})
        if found := summary.communication:
            per_batch, share = (found.milliseconds / batches, "ms"), (found.share, "share")
            hidden = " of this time is hidden: meanwhile the same device computes. The times above leave it out."
            blocks.append(_text("Collectives take ", per_batch, " per batch. ", share, hidden))
        blocks.append({"type": "steps", **figures, "steps": rows})
        if times := summary.pipeline:
            waits = ("Stages wait ", (times.bubble, "share"), " of the time between their first and last operation, ")
            ideal = (f"over all batches. {times.stages} stages of equal time would wait ", (times.ideal, "share"))
            blocks.append(_text(*waits, *ideal, f" with {times.microbatches} micro-batches."))
    else:
        blocks.append(_text("This trace shows no steps.", kind=""))
    per_batch = " per batch" if figures else ""
    peaks = [(device, peak) for device, peak in summary.peak_memory.items() if peak is not None]
    charts = [
        _layers(summary),
        _kinds(summary, f"self time{per_batch}", batches),
        _memory(summary),
        _table("Peak memory", {"device": "", "peak": "B"}, peaks) if peaks else None,
    ]
    if any(charts):
        blocks.append({"type": "charts", "blocks": [chart for chart in charts if chart]})
    if summary.operations:
        heads = {"operation": "", f"self time{per_batch}": "ms", "share": "share"}
        heads |= {"runs in the window": "count", "type": "", "layer": ""}
        rows = []
        for one in summary.operations[:MOST_OPERATIONS]:
            figures = (summary.per_step(one), one.share, one.count)
            rows.append((_shorten(one.name), *figures, VARIANT.sub("", one.kind), one.layer or None))
        blocks.append(_table("Operations that took longest", heads, rows, "operations", meter=2))
    if summary.notes:
        blocks.append({"type": "notes", "notes": summary.notes})
    return {"type": "window", "title": f"Window {window.name}", "blocks": blocks}


def _shorten(name: str) -> str:
    """Elides the middle of a very long name."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"


def _layers(summary: ProfileSummary) -> Block | None:
    """The layers that take longest, each as a lane of its passes; `None` if the trace names no layer.

    A box of a lane is a pass and its milliseconds.
    """
    # Waiting for other replicas would dwarf the layers' times.
    layers = [layer for layer in summary.layers if layer.is_layer or layer.name != COLLECTIVES]
    if not layers:
        return None
    batches, total = len(summary.steps) or 1, sum(layer.total for layer in layers) or 1.0
    # By layer, milliseconds of each pass.
    times = [[getattr(layer, name) / batches or None for name in PASSES] for layer in layers]
    lanes = [
        {
            "name": layer.name,
            "apart": not layer.is_layer,
            "boxes": [(name, time) for name, time in zip(PASSES, passes, strict=True) if time],
        }
        for layer, passes in zip(layers[:_MOST_LAYER_BARS], times, strict=False)
    ]
    note = "Times of concurrent threads and devices are summed."
    if len(lanes) < len(layers):
        listed = "all" if len(layers) <= MOST_TIMED_LAYERS else f"{MOST_TIMED_LAYERS} of them"
        note += f" The chart shows {len(lanes)} of {len(layers):,} layers; the table lists {listed}."
    if any(not layer.is_layer for layer in layers):
        note += " Entries in italics belong to no layer, or can't be attributed to one, such as custom gradients."
    return {
        "type": "lanes",
        "title": f"Time {'per batch' if summary.steps else 'in the window'} by layer",
        "lanes": lanes,
        "kinds": [name for column, name in enumerate(PASSES) if any(passes[column] for passes in times)],
        "heads": [("layer", ""), ("total", "ms"), *((name, "ms") for name in PASSES), ("share", "share")],
        "rows": [
            (layer.name, layer.total / batches, *passes, layer.total / total)
            for layer, passes in zip(layers[:MOST_TIMED_LAYERS], times, strict=False)
        ],
        "note": note,
    }


def _kinds(summary: ProfileSummary, time: str, batches: int) -> Block | None:
    """The kinds of operations; the last row sums the kinds left out."""
    rows: list[tuple[Any, ...]] = [
        (kind.kind, kind.milliseconds / batches, kind.share, kind.count) for kind in summary.kinds
    ]
    if len(rows) > MOST_KINDS:
        rest = rows[MOST_KINDS - 1 :]
        rows[MOST_KINDS - 1 :] = [(f"{len(rest)} other kinds", *map(sum, [*zip(*rest, strict=True)][1:]))]
    heads = {"kind": "", time: "ms", "share": "share", "runs in the window": "count"}
    return _table("Time by kind of operation", heads, rows, "kinds", meter=2) if rows else None


def _memory(summary: ProfileSummary) -> Block | None:
    """The memory in use over the window."""
    # Host memory (the process's RSS) isn't tracked by any allocator in the trace.
    names = {use.name: "host" if use.name == "host" else f"allocator {use.name}" for use in summary.memory}
    series = [Series("", names[use.name], "", np.array(use.batches), np.array(use.values)) for use in summary.memory]
    return line_chart("Memory in use in the window", "B", series[:MOST_LINES], counted="batch")


def _throughput(run: Run) -> list[Block]:
    excluded = [series for series in run.throughput if series.quantity in _EXCLUDED and not series.name]
    marks = []
    for one in excluded:
        named = {"kind": one.quantity, "name": _EXCLUDED[one.quantity]}
        marks.append({**named, "seconds": one.finite.sum(), "steps": one.steps[select_points(one.values)]})
    charts = model_charts(run.throughput, _SPEED_CHARTS, marks=marks) + model_charts(run.throughput, _THROUGHPUT_CHARTS)
    blocks: list[Block] = [{"type": "charts", "blocks": charts}] if charts else []
    if run.retraces:
        heads = {"update": "", "function": "", "shapes": ""}
        blocks.append(_table("Retraced functions, with the shapes that caused it", heads, run.retraces))
        if run.retrace_count > len(run.retraces):
            blocks.append(_text(f"The last {len(run.retraces)} of {run.retrace_count} are shown."))
    return blocks


def _gradient(telemetry: Sequence[Series]) -> list[Block]:
    blocks = [*model_charts(telemetry, _GRADIENT_CHARTS), *by_layer(telemetry)]
    return [{"type": "charts", "blocks": blocks}] if blocks else []
