"""The report's views of a run's per-step records: charts of the whole model, and of quantities by layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keras_paragrad.profiling.report.formatting import (
    axis_for,
    count,
    milliseconds,
    number,
    operations,
    share,
    size,
    steps_axis,
)
from keras_paragrad.profiling.report.lines import MOST_LINES, Line, LineChart, line_chart, sparkline
from keras_paragrad.profiling.report.runs import Series

MOST_LAYERS = 100

Formatter = Callable[[float | None], str]


@dataclass(frozen=True)
class ChartSpec:
    """A chart of whole-model quantities.

    Attributes:
        title: What it shows.
        quantities: The quantities, with the names of their lines.
        formatter: Formats a value.
        may_be_logarithmic: Whether a logarithmic scale suits the quantity.
        has_exclusions: Whether the values exclude the times of `EXCLUDED`.
    """

    title: str
    quantities: Mapping[str, str]
    formatter: Formatter
    may_be_logarithmic: bool = False
    has_exclusions: bool = False

    def draw(self, series: Sequence[Series], excluded: Mapping[str, Series] | None = None) -> LineChart | None:
        """Draws some series, with marks where time was excluded; `None` without values, or for shares of 0."""
        if self.formatter in (count, share) and not any(record.values.any() for record in series):
            return None
        return line_chart(self.title, series, self.formatter, self.may_be_logarithmic, excluded=excluded)


def _seconds(value: float | None) -> str:
    return milliseconds(None if value is None else value * 1e3)


GRADIENT_CHARTS = (
    ChartSpec(
        "Gradient of the whole model, L2 norm",
        {"gradient_norm": "before clipping", "clipped_gradient_norm": "after clipping"},
        number,
        True,
    ),
    ChartSpec("Weights of the whole model, L2 norm", {"weight_norm": "weights"}, number),
    ChartSpec("Update to weights of the whole model, ratio of L2 norms", {"update_ratio": "ratio"}, number, True),
    ChartSpec("Values of the whole gradient that are not finite", {"nonfinite": "values"}, count),
    ChartSpec("Learning rate", {"learning_rate": "learning rate"}, number),
    ChartSpec("Loss scale", {"loss_scale": "loss scale"}, number),
)
THROUGHPUT_CHARTS = (
    ChartSpec(
        "Throughput, examples per second",
        {"examples_per_second": "examples per second"},
        number,
        has_exclusions=True,
    ),
    ChartSpec(
        "Step time over the run",
        {"step_time_p50_ms": "median", "step_time_p95_ms": "95th percentile"},
        milliseconds,
        has_exclusions=True,
    ),
    ChartSpec("Memory in use", {"host_memory_bytes": "host", "device_memory_bytes": "device"}, size),
    ChartSpec("Share of the peak: model FLOPs utilisation", {"mfu": "utilisation"}, share),
)
# Times in seconds that values exclude, with their names in the report.
EXCLUDED = {"compile_s": "steps that compiled", "profiler_s": "pauses by Profiler"}
# Quantities whose last value alone matters.
_LAST_VALUES: dict[str, tuple[str, Formatter]] = {
    "time_to_first_step_s": ("Time to the first step", _seconds),
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


@dataclass(frozen=True)
class LayerView:
    """One quantity, layer by layer.

    Attributes:
        title: The quantity, with its unit.
        chart: The selected layers, or `None` if there is nothing to draw.
        rows: All layers as sparklines, with their statistics.
        note: What was left out, or why there is no chart.
    """

    title: str
    chart: LineChart | None
    rows: tuple[Line, ...]
    note: str


def charts(series: Sequence[Series], specs: Sequence[ChartSpec]) -> tuple[LineChart, ...]:
    """The charts of whole-model quantities for which there are records."""
    of_model = {record.quantity: record for record in series if not record.name}
    excluded = {name: of_model[quantity] for quantity, name in EXCLUDED.items() if quantity in of_model}
    drawn = (
        spec.draw(
            [replace(of_model[key], name=name) for key, name in spec.quantities.items() if key in of_model],
            excluded if spec.has_exclusions else None,
        )
        for spec in specs
    )
    return tuple(chart for chart in drawn if chart)


def last_values(series: Sequence[Series]) -> tuple[tuple[str, str], ...]:
    """The titles and values of quantities whose last value alone matters."""
    return tuple(
        (_LAST_VALUES[record.quantity][0], _LAST_VALUES[record.quantity][1](float(record.values[-1])))
        for record in series
        if record.quantity in _LAST_VALUES and not record.name
    )


def layer_views(series: Sequence[Series]) -> tuple[LayerView, ...]:
    """A view for every quantity recorded per layer."""
    by_quantity = (
        (quantity, [record for record in series if record.quantity == quantity and record.name])
        for quantity in LAYER_QUANTITIES
    )
    return tuple(_layer_view(quantity, layers) for quantity, layers in by_quantity if layers)


def median_of(series: Sequence[Series], quantity: str) -> float | None:
    """The median of a quantity of the whole model, or `None` if it has no finite value."""
    finite = next(
        (record.finite for record in series if (record.quantity, record.name) == (quantity, "")), np.array([])
    )
    return float(np.median(finite)) if len(finite) else None


def _layer_view(quantity: str, layers: Sequence[Series]) -> LayerView:
    """The chart and the table of one quantity of all layers."""
    title, is_count = LAYER_QUANTITIES[quantity], quantity == "nonfinite"
    values = sum(len(layer.values) for layer in layers)
    if is_count and not any(layer.values.any() for layer in layers):
        return LayerView(title, None, (), f"None: {count(values)} counts in {count(len(layers))} layers are all 0.")
    formatter = count if is_count else number
    # Records of both whole layers and their variables: the variables are in the table only.
    whole = [layer for layer in layers if not layer.variable] or layers
    selected = _select(whole)
    chart = line_chart(title, selected, formatter)
    finite = np.concatenate([layer.finite for layer in layers])
    y_axis = axis_for([float(value) for value in finite], formatter)
    x_axis = steps_axis(min(layer.steps[0] for layer in layers), max(layer.steps[-1] for layer in layers), count)
    rows = tuple(sparkline(layer, x_axis, y_axis) for layer in layers[:MOST_LAYERS])
    notes = []
    if len(selected) < len(whole):
        notes.append(f"{len(selected)} of {count(len(whole))} layers are drawn: those that stand out.")
    if len(layers) > MOST_LAYERS:
        notes.append(f"The table has the first {MOST_LAYERS}; the file of the telemetry has all.")
    return LayerView(title, chart, rows, " ".join(notes))


def _select(layers: Sequence[Series]) -> list[Series]:
    """Selects layers to draw: with non-finite values, then the largest and the smallest; in the model's order."""
    if len(layers) <= MOST_LINES:
        return list(layers)
    # As many of the first in rank as of the last, or one more.
    ranks = [_rank(layer) for layer in layers]
    ordered = sorted(range(len(layers)), key=lambda index: ranks[index], reverse=True)
    chosen = [*ordered[: MOST_LINES - MOST_LINES // 2], *ordered[-(MOST_LINES // 2) :]]
    return [layers[index] for index in sorted(chosen)]


def _rank(layer: Series) -> tuple[int, float]:
    """A key that sorts layers by the number of non-finite values, then by the largest value."""
    finite = layer.finite
    return len(layer.values) - len(finite), float(finite.max()) if len(finite) else 0.0
