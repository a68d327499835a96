"""The charts of a report over the steps: of the whole model, and of a quantity of all layers. A `Series` is a line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from keras_paragrad.profiling.report.runs import Series

Block = dict[str, Any]

MOST_POINTS = 400
# Points of a line in a cell of a table.
_MOST_IN_CELL = 60
# The most lines that a reader can tell apart by colour and dashes.
MOST_LINES = 5
MOST_LAYERS = 100
_LAYER_QUANTITIES = {
    "gradient_norm": "Gradient by layer, L2 norm",
    "clipped_gradient_norm": "Gradient after clipping by layer, L2 norm",
    "weight_norm": "Weights by layer, L2 norm",
    "update_ratio": "Update to weights by layer, ratio of L2 norms",
    "nonfinite": "Values of the gradient that are not finite, by layer",
}


class Chart(NamedTuple):
    """A chart of whole-model quantities, with their lines' names; `logarithmic` is whether such an axis suits them."""

    title: str
    quantities: Mapping[str, str]
    unit: str = "number"
    logarithmic: bool = False


def model_charts(series: Sequence[Series], charts: Sequence[Chart], marks: Sequence[Block] = ()) -> list[Block]:
    """The charts of whole-model quantities for which there are records."""
    of_model = {record.quantity: record for record in series if not record.name}
    blocks = []
    for title, quantities, unit, logarithmic in charts:
        found = [replace(of_model[key], name=name) for key, name in quantities.items() if key in of_model]
        # Counts and shares that are 0 throughout say nothing; a gradient of 0 does.
        if unit not in ("count", "share") or any(record.values.any() for record in found):
            blocks.append(line_chart(title, unit, found, logarithmic=logarithmic, marks=marks))
    return [block for block in blocks if block]


def by_layer(telemetry: Sequence[Series]) -> list[Block]:
    """The chart and the table of each quantity of all layers for which there are records."""
    of_layers = [series for series in telemetry if series.name]
    found = {name: [series for series in of_layers if series.quantity == name] for name in _LAYER_QUANTITIES}
    return [_layers_block(quantity, layers) for quantity, layers in found.items() if layers]


def _layers_block(quantity: str, layers: Sequence[Series]) -> Block:
    title, unit = _LAYER_QUANTITIES[quantity], "count" if quantity == "nonfinite" else "number"
    block: Block = {"type": "layers", "title": title, "unit": unit}
    if unit == "count" and not any(layer.values.any() for layer in layers):
        values = sum(len(layer.values) for layer in layers)
        return {**block, "notes": [f"None: {values:,} counts in {len(layers):,} layers are all 0."]}
    # Records of both whole layers and their variables: the variables are in the table only.
    whole = [layer for layer in layers if not layer.variable] or layers
    drawn, notes = _select(whole), []
    if len(drawn) < len(whole):
        notes.append(f"{len(drawn)} of {len(whole):,} layers are drawn: those that stand out.")
    if len(layers) > MOST_LAYERS:
        notes.append(f"The table has the first {MOST_LAYERS}; the file of the telemetry has all.")
    lines = [_line(layer, _MOST_IN_CELL, 3) for layer in layers[:MOST_LAYERS]]
    return {**block, "notes": notes, "chart": line_chart(title, unit, drawn, logarithmic=True), "lines": lines}


def _select(layers: Sequence[Series]) -> list[Series]:
    """Layers to draw: with non-finite values, then the largest and the smallest; in the model's order."""
    ranks = [(len(layer.values) - len(layer.finite), layer.finite.max(initial=-math.inf)) for layer in layers]
    ordered = sorted(range(len(layers)), key=lambda index: ranks[index], reverse=True)
    # As many of the first in rank as of the last, or one more.
    chosen = {*ordered[: MOST_LINES - MOST_LINES // 2], *ordered[-(MOST_LINES // 2) :]}
    return [layers[index] for index in sorted(chosen)] if len(layers) > MOST_LINES else [*layers]


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    counted: str = "update",
    logarithmic: bool = False,
    marks: Sequence[Block] = (),
) -> Block | None:
    """A chart of some series, or `None` if none of them has a value."""
    series = [record for record in series if len(record.values)]
    if not series:
        return None
    notes = []
    if (longest := max(len(record.values) for record in series)) > MOST_POINTS:
        notes.append(f"{longest:,} values, drawn as at most {MOST_POINTS} points: each span's smallest and largest.")
    if nonfinite := sum(len(record.values) - len(record.finite) for record in series):
        notes.append(f"{nonfinite:,} values are NaN or infinite: marked ✕ at the upper edge.")
    chart = {"type": "lines", "title": title, "unit": unit, "counted": counted, "logarithmic": logarithmic}
    return {**chart, "lines": [_line(record, MOST_POINTS, 6) for record in series], "marks": marks, "notes": notes}


def _line(series: Series, most: int, digits: int) -> Block:
    """At most `most` points of a series, with so many digits, and the statistics of all."""
    steps, values = series.steps.astype(float), series.values.astype(float)
    chosen, finite = select_points(values, most), np.flatnonzero(np.isfinite(values))
    line = {
        "name": series.name or "value",
        "steps": np.round(steps[chosen], 3),
        "values": [value if value.is_integer() else float(f"{value:.{digits}g}") for value in values[chosen].tolist()],
        "last": values[-1],
    }
    if len(finite):
        low, high, *_ = _extremes(values, finite)
        line |= {"smallest": (values[low], steps[low]), "largest": (values[high], steps[high])}
        line["median"] = float(np.median(values[finite]))
    return line


def select_points(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Indices of at most `most` values to draw, for `most` of at least 5: the extremes of equally long spans.

    Each span keeps its smallest, its largest and its first non-finite value; the first and last value stay too.
    """
    if len(values) <= most:
        return np.arange(len(values))
    per_span = 2 if np.isfinite(values).all() else 3
    spans = np.array_split(np.arange(len(values)), (most - 2) // per_span)
    inside = [index for span in spans for index in _extremes(values, span)]
    return np.unique([0, *inside, len(values) - 1])


def _extremes(values: np.ndarray, span: np.ndarray) -> list[int]:
    is_finite = np.isfinite(values[span])
    finite, nonfinite = span[is_finite], span[~is_finite]
    extremes = [finite[np.argmin(values[finite])], finite[np.argmax(values[finite])]] if len(finite) else []
    return [*extremes, *nonfinite[:1]]
