"""The report's chart of the time of each layer, by pass, and its table of kinds of operations."""

from collections.abc import Sequence

from keras_paragrad.profiling.report.formatting import Axis, axis_for, count, milliseconds, share
from keras_paragrad.profiling.report.lanes import Box, Lane, LanesChart
from keras_paragrad.profiling.summary import COLLECTIVES, PASSES, KindTime, LayerTime, ProfileSummary

MOST_LAYERS = 50
MOST_KINDS = 12
_MOST_BARS = 15
_PASS_NAMES = {"forward": "forward", "backward": "backward", "recompute": "recompute", "other": "other"}
_HEADS = ("layer", "total", *_PASS_NAMES.values(), "share")


def layers_chart(summary: ProfileSummary) -> LanesChart | None:
    """Draws the layers that take longest, each as a bar of its passes; `None` if the trace names no layer."""
    # Waiting for other replicas would dwarf the layers' times.
    layers = [layer for layer in summary.layers if layer.is_layer or layer.name != COLLECTIVES]
    if not layers:
        return None
    batches = len(summary.steps) or 1
    drawn = layers[:_MOST_BARS]
    total = sum(layer.total for layer in layers) or 1.0
    x_axis = axis_for([drawn[0].total / batches], milliseconds, may_be_logarithmic=False)
    height = 100 / len(drawn)
    lanes = tuple(_lane(layer, index * height, height, batches, x_axis) for index, layer in enumerate(drawn))
    passes = [pass_ for pass_ in PASSES if any(getattr(layer, pass_) for layer in layers)]
    notes = ["Times of concurrent threads and devices are summed."]
    if len(drawn) < len(layers):
        notes.append(
            f"The chart shows {len(drawn)} of {count(len(layers))} layers; the table lists {_table_size(layers)}."
        )
    if any(not layer.is_layer for layer in layers):
        notes.append("Entries in italics belong to no layer, or can't be attributed to one, such as custom gradients.")
    per = "per batch" if summary.steps else "in the window"
    longest = "; ".join(f"{layer.name}: {milliseconds(layer.total / batches)}" for layer in drawn[:3])
    return LanesChart(
        title=f"Time {per} by layer",
        x_axis=x_axis,
        lanes=lanes,
        legend=tuple((pass_, _PASS_NAMES[pass_]) for pass_ in passes),
        heads=_HEADS,
        rows=tuple(_cells(layer, batches, total) for layer in layers[:MOST_LAYERS]),
        description=f"Time {per} of {count(len(layers))} layers, by pass. Longest: {longest}.",
        note=" ".join(notes),
    )


def kind_rows(summary: ProfileSummary) -> tuple[tuple[tuple[str, ...], float], ...]:
    """Rows of the kinds of operations: the cells, and the share in percent; the last row sums the kinds left out."""
    batches = len(summary.steps) or 1
    kinds: Sequence[KindTime] = summary.kinds
    if len(kinds) > MOST_KINDS:
        rest = kinds[MOST_KINDS - 1 :]
        sums = [sum(getattr(kind, name) for kind in rest) for name in ("count", "milliseconds", "share")]
        kinds = [*kinds[: MOST_KINDS - 1], KindTime(f"{len(rest)} other kinds", *sums)]
    return tuple(
        (
            (kind.kind, milliseconds(kind.milliseconds / batches), share(kind.share), count(kind.count)),
            round(100 * kind.share, 1),
        )
        for kind in kinds
    )


def _table_size(layers: Sequence[LayerTime]) -> str:
    return "all" if len(layers) <= MOST_LAYERS else f"{MOST_LAYERS} of them"


def _lane(layer: LayerTime, top: float, height: float, batches: int, x_axis: Axis) -> Lane:
    """A layer's lane, which is `height` percent of the chart high: the name, and a bar with a box for each pass."""
    boxes: list[Box] = []
    start = 0.0
    for pass_ in PASSES:
        time = getattr(layer, pass_) / batches
        if time > 0:
            left, right = x_axis.position(start), x_axis.position(start + time)
            tooltip = f"{layer.name}, {_PASS_NAMES[pass_]}: {milliseconds(time)}"
            boxes.append(Box(pass_, left, round(right - left, 2), "", tooltip))
            start += time
    # The upper half has the name.
    name_top, bar_top = round(top + 0.25 * height, 2), round(top + 0.45 * height, 2)
    return Lane(layer.name, bar_top, round(0.45 * height, 2), tuple(boxes), name_top, not layer.is_layer)


def _cells(layer: LayerTime, batches: int, total: float) -> tuple[str, ...]:
    passes = (getattr(layer, pass_) / batches for pass_ in PASSES)
    times = (milliseconds(time) if time else "–" for time in passes)
    return (layer.name, milliseconds(layer.total / batches), *times, share(layer.total / total))
