"""The report's views of a run's per-step records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keras_paragrad.profiling.report.axes import axis_for, steps_axis
from keras_paragrad.profiling.report.lines import MOST_LINES, Line, LineChart, line_chart, named, sparkline
from keras_paragrad.profiling.report.records import Series
from keras_paragrad.profiling.report.units import count, milliseconds, number, operations, share, size

MOST_LAYERS = 100


Written = Callable[[float | None], str]


@dataclass(frozen=True)
class Drawn:
    """A chart of whole-model quantities.

    Attributes:
        title: What it shows.
        quantities: What is in it, with the names of the lines.
        written: How values are written.
        logarithmic: Whether they can differ by orders of magnitude from step to step, and are read that way.
        counted: The unit of the file's steps.
        interrupted: Whether the values exclude what `LEFT_OUT` names.
    """

    title: str
    quantities: Mapping[str, str]
    written: Written
    logarithmic: bool = False
    counted: str = "step"
    interrupted: bool = False


def _seconds(value: float | None) -> str:
    return milliseconds(None if value is None else value * 1e3)


GRADIENT_CHARTS = (
    Drawn(
        "Gradient of the whole model, L2 norm",
        {"gradient_norm": "before clipping", "clipped_gradient_norm": "after clipping"},
        number,
        True,
        "update",
    ),
    Drawn("Weights of the whole model, L2 norm", {"weight_norm": "weights"}, number, False, "update"),
    Drawn("Update to weights of the whole model, ratio of L2 norms", {"update_ratio": "ratio"}, number, True, "update"),
    Drawn("Values of the whole gradient that are not finite", {"nonfinite": "values"}, count, False, "update"),
    Drawn("Learning rate", {"learning_rate": "learning rate"}, number, False, "update"),
    Drawn("Loss scale", {"loss_scale": "loss scale"}, number, False, "update"),
)
THROUGHPUT_CHARTS = (
    Drawn(
        "Throughput, examples per second",
        {"examples_per_second": "examples per second"},
        number,
        interrupted=True,
    ),
    Drawn(
        "Step time over the run",
        {"step_time_p50_ms": "median", "step_time_p95_ms": "95th percentile"},
        milliseconds,
        interrupted=True,
    ),
    Drawn("Memory in use", {"host_memory_bytes": "host", "device_memory_bytes": "device"}, size),
    Drawn("Share of the peak: model FLOPs utilisation", {"mfu": "utilisation"}, share),
    Drawn("Share of collectives in the step", {"collective_share": "collectives"}, share),
)
# What such values exclude, in seconds, and how the report names it.
LEFT_OUT = {"compile_s": "steps that compiled", "profiler_s": "pauses by Profiler"}
# Figures of which only the last value matters.
LAST_VALUES: dict[str, tuple[str, Written]] = {
    "time_to_first_step_s": ("Time to the first step", _seconds),
    "updates_per_second": ("Updates per second", number),
    "flops_per_step": ("FLOPs per step", operations),
    "retraces": ("Retraces", count),
}
LAYER_QUANTITIES = {
    "gradient_norm": "Gradient by layer, L2 norm",
    "clipped_gradient_norm": "Gradient after clipping by layer, L2 norm",
    "weight_norm": "Weights by layer, L2 norm",
    "update_ratio": "Update to weights by layer, ratio of L2 norms",
    "nonfinite": "Values of the gradient that are not finite, by layer",
}
COUNTED = {"nonfinite"}


@dataclass(frozen=True)
class LayerView:
    """One quantity, layer by layer.

    Attributes:
        title: What it is, with its unit.
        chart: The layers that stand out, or `None` if there is nothing to draw.
        rows: All layers, each as a small line, with its figures.
        note: What was left out, or what there is to say in place of a chart.
    """

    title: str
    chart: LineChart | None
    rows: tuple[Line, ...]
    note: str


def charts(series: Sequence[Series], wanted: Sequence[Drawn]) -> tuple[LineChart, ...]:
    """The charts of whole-model quantities for which there are records."""
    whole = {one.quantity: one for one in series if not one.name}
    left_out = {words: whole[name] for name, words in LEFT_OUT.items() if name in whole}
    found = (
        chart_of(
            drawn,
            [named(whole[name], words) for name, words in drawn.quantities.items() if name in whole],
            left_out if drawn.interrupted else None,
        )
        for drawn in wanted
    )
    return tuple(chart for chart in found if chart)


def chart_of(drawn: Drawn, series: Sequence[Series], left_out: Mapping[str, Series] | None = None) -> LineChart | None:
    """One chart of some series, with marks where something was left out, or `None` without any."""
    return line_chart(drawn.title, series, drawn.written, drawn.logarithmic, drawn.counted, left_out)


def last_values(series: Sequence[Series]) -> tuple[tuple[str, str], ...]:
    """The figures of which only the last value matters, with their titles."""
    return tuple(
        (LAST_VALUES[one.quantity][0], LAST_VALUES[one.quantity][1](float(one.values[-1])))
        for one in series
        if one.quantity in LAST_VALUES and not one.name
    )


def layer_views(series: Sequence[Series]) -> tuple[LayerView, ...]:
    """A view for every quantity recorded per layer."""
    found = ((name, [one for one in series if one.quantity == name and one.name]) for name in LAYER_QUANTITIES)
    return tuple(_layer_view(name, layers) for name, layers in found if layers)


def median_of(series: Sequence[Series], quantity: str, name: str = "") -> float | None:
    """The median of a quantity, or `None` if it has no finite value."""
    found = next((one.finite for one in series if (one.quantity, one.name) == (quantity, name)), np.array([]))
    return float(np.median(found)) if len(found) else None


def _layer_view(quantity: str, layers: Sequence[Series]) -> LayerView:
    title = LAYER_QUANTITIES[quantity]
    values = sum(len(layer.values) for layer in layers)
    if quantity in COUNTED and not any(layer.values.any() for layer in layers):
        return LayerView(title, None, (), f"None: {count(values)} counts in {count(len(layers))} layers are all 0.")
    written = count if quantity in COUNTED else number
    # If there are figures of both whole layers and their variables, only the table shows all of them.
    whole = [layer for layer in layers if not layer.variable] or layers
    standing_out = _standing_out(whole)
    chart = line_chart(title, standing_out, written, counted="update")
    finite = np.concatenate([layer.finite for layer in layers])
    up = axis_for([float(value) for value in finite], written)
    across = steps_axis(min(layer.steps[0] for layer in layers), max(layer.steps[-1] for layer in layers), count)
    rows = tuple(sparkline(layer, across, up) for layer in layers[:MOST_LAYERS])
    return LayerView(title, chart, rows, _note(layers, whole, standing_out))


def _standing_out(layers: Sequence[Series]) -> list[Series]:
    """The layers to draw: those with non-finite values, then the largest and the smallest; in the model's order."""
    if len(layers) <= MOST_LINES:
        return list(layers)
    ranks = [_rank(layer) for layer in layers]
    ordered = sorted(range(len(layers)), key=lambda index: ranks[index], reverse=True)
    chosen = [*ordered[: MOST_LINES - MOST_LINES // 2], *ordered[-(MOST_LINES // 2) :]]
    return [layers[index] for index in sorted(chosen)]


def _rank(layer: Series) -> tuple[int, float]:
    finite = layer.finite
    return len(layer.values) - len(finite), float(finite.max()) if len(finite) else 0.0


def _note(layers: Sequence[Series], whole: Sequence[Series], drawn: Sequence[Series]) -> str:
    notes = []
    if len(drawn) < len(whole):
        notes.append(f"{len(drawn)} of {count(len(whole))} layers are drawn: those that stand out.")
    if len(layers) > MOST_LAYERS:
        notes.append(f"The table has the first {MOST_LAYERS}; the file of the telemetry has all.")
    return " ".join(notes)
