"""Draws the charts of the benchmarks' first page from what is saved in `results/`, for `python benchmarks/tables.py`.

Each is an SVG with colors for light and for dark mode, narrow enough for a phone. It has a number at each bar, and
names its scale.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from tables import (
    ROOT,
    clipped_steps,
    in_words,
    opacus_steps,
    private_steps,
    rows_of,
    saved,
    without_range,
    working,
)

PICTURES = ROOT / "docs" / "images" / "benchmarks"
WIDTH, LEFT, RIGHT = 460, 14, 90
TITLE, ROW, BAR, SCALE = 30, 38, 12, 24
STYLE = """<style>
text { font: 14px Helvetica, Arial, sans-serif; fill: #1b1f24; }
.title { font-weight: bold; } .scale { font-size: 12px; }
.page { fill: #ffffff; } .ours { fill: #0969b3; } .other { fill: #9a9da2; } .line { fill: #1b1f24; }
@media (prefers-color-scheme: dark) {
  text { fill: #d6d8da; }
  .page { fill: #17191c; } .ours { fill: #56a8f0; } .other { fill: #7d8288; } .line { fill: #d6d8da; }
}
</style>"""


class Bar(NamedTuple):
    """A bar with its number.

    Attributes:
        label: What it shows, written above it.
        value: Its length on the panel's scale; an error's name has no bar.
        ours: Whether it is a measurement of this package, and not of what it is compared with.
    """

    label: str
    value: float | str
    ours: bool = True


class Panel(NamedTuple):
    """Bars on one scale.

    Attributes:
        title: What is measured, with its unit.
        bars: From top to bottom.
        reference: The value at which a line is drawn, such as 1 for ratios.
        smallest: On a logarithmic scale, the value of a bar without length.
    """

    title: str
    bars: Sequence[Bar]
    reference: float | None = None
    smallest: float | None = None

    @property
    def height(self) -> int:
        return TITLE + ROW * len(self.bars) + SCALE

    @property
    def ticks(self) -> list[float]:
        """The values that are written at the scale."""
        largest = max(each.value for each in self.bars if not isinstance(each.value, str))
        if self.smallest is not None:
            ticks = range(round(math.log10(self.smallest)), math.floor(math.log10(largest)) + 1, 2)
            return [10.0**power for power in ticks]
        # What is near the end would lie on the scale's name.
        room = 0.85 * max(largest, self.reference or 0.0)
        power = 10.0 ** math.floor(math.log10(room))
        return [0.0, max(factor * power for factor in (1, 2, 5) if factor * power <= room)]

    def place(self, value: float) -> float:
        """The horizontal position of a value, in pixels."""
        values = [each.value for each in self.bars if not isinstance(each.value, str)]
        if self.smallest is None:
            low, high = min(0.0, *values), max([*values, self.reference or 0.0])
            share = (value - low) / (high - low)
        else:
            share = math.log(value / self.smallest) / math.log(max(values) / self.smallest)
        return LEFT + share * (WIDTH - LEFT - RIGHT)


def drawn(panels: Sequence[Panel]) -> str:
    """The SVG of panels, one below the other."""
    height = sum(each.height for each in panels) + 8 * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        STYLE,
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
    ]
    top = 0
    for panel in panels:
        parts += _panel(panel, top)
        top += panel.height + 8
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int) -> list[str]:
    """The SVG elements of a panel that begins `top` pixels from the top."""
    parts = [f'<text class="title" x="{LEFT}" y="{top + 21}">{escape(panel.title)}</text>']
    start = LEFT if panel.smallest else panel.place(0.0)
    line = None if panel.reference is None else panel.place(panel.reference)
    for number, bar in enumerate(panel.bars):
        y = top + TITLE + ROW * number
        parts.append(f'<text x="{LEFT}" y="{y + 14}">{escape(bar.label)}</text>')
        if isinstance(bar.value, str):
            shown, end = bar.value, start
        else:
            shown, end = _number(bar.value, panel), panel.place(bar.value)
            width = max(abs(end - start), 1.0)
            place = f'x="{min(start, end):.1f}" y="{y + 19}" width="{width:.1f}" height="{BAR}"'
            parts.append(f'<rect class="{"ours" if bar.ours else "other"}" {place}/>')
        after = max(start, end)
        if line is not None:
            parts.append(f'<rect class="line" x="{line - 1:.1f}" y="{y + 17}" width="2" height="{BAR + 4}"/>')
            # The number is written beside the line rather than on it.
            after = line if after < line < after + 40 else after
        parts.append(f'<text x="{after + 6:.1f}" y="{y + 30}">{escape(shown)}</text>')
    return [*parts, *_scale(panel, top + panel.height)]


def _scale(panel: Panel, bottom: int) -> list[str]:
    """The SVG elements of the scale below a panel: a line with ticks, their values, and what kind of scale it is."""
    y = bottom - SCALE + 6
    parts = [f'<rect class="other" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="1"/>']
    for tick in panel.ticks:
        x, shown = panel.place(tick), f"{tick:.0e}" if panel.smallest is not None else f"{tick:g}"
        parts.append(f'<rect class="other" x="{x:.1f}" y="{y}" width="1" height="5"/>')
        parts.append(f'<text class="scale" x="{x:.1f}" y="{y + 16}">{shown}</text>')
    kind = "linear" if panel.smallest is None else "logarithmic"
    parts.append(f'<text class="scale" x="{WIDTH - LEFT}" y="{y + 16}" text-anchor="end">{kind} scale</text>')
    return parts


def _number(value: float, panel: Panel) -> str:
    if panel.smallest is not None:
        return f"{value:.0e}"
    return f"{value:.0f}" if value >= 10 else in_words(float(value))


def exactness() -> list[Panel]:
    rows = rows_of("exactness", "Largest difference from")
    bars = []
    for name in (
        "an uneven last micro-batch",
        "weighted examples, weighted mean",
        "learning-rate schedule",
        "two replicas",
    ):
        theirs, ours = list(rows[name].values())[1:]
        bars += [Bar(f"{name}: Keras", _float(theirs), False), Bar(f"{name}: this package", _float(ours))]
    return [Panel("Largest difference of a weight, accumulating 4", bars, smallest=1e-8)]


def _float(text: str) -> float | str:
    """A number, or the text if it is an error's name."""
    try:
        return float(text)
    except ValueError:
        return text


def accumulation() -> list[Panel]:
    row = rows_of("accumulation", "Milliseconds a micro-batch of 64")["jit on, k=4"]
    peaks = rows_of("memory", "Peak memory")
    names = {"one batch of 4096": False, "microbatch(512), batch of 4096": True, "microbatch(128), batch of 4096": True}
    return [
        Panel(
            "Milliseconds a micro-batch, accumulating 4, XLA",
            [
                Bar("Keras's gradient_accumulation_steps", row["built-in"], False),
                Bar("AccumulatingOptimizer", row["ExactAccumulation"]),
            ],
        ),
        Panel("Peak memory, MB", [Bar(name, peaks[name]["jit off"], ours) for name, ours in names.items()]),
    ]


def distribution() -> list[Panel]:
    title = "A step on 2 replicas, {}, batch of 128; gradients are added up on one"
    models = {"MLP": "MLP 784-512-512-10", "CNN": "CNN of two convolutions"}
    bars = [
        Bar(f"{name}, {optimizer}", without_range(row["ours to stock, at most 1"]))
        for name, model in models.items()
        for optimizer, row in rows_of("distribution", title.format(model)).items()
    ]
    sent = rows_of("distribution", "Bytes on the loopback")
    return [
        Panel("A step on 2 replicas, to MirroredStrategy's", bars, reference=1.0),
        Panel(
            "MB between two workers a micro-batch",
            [
                Bar(f"an update for every {k}" if k > 1 else "an update each", sent[f"k={k}"]["most"] / 1e6)
                for k in (1, 4, 16)
            ],
        ),
    ]


def sharding() -> list[Panel]:
    held = rows_of("sharding", "Memory of training a Transformer")
    names = ("mirrored", 'shard="optimizer"', 'shard="parameters"', 'shard="parameters", recomputed')
    largest = rows_of("sharding", "The largest Transformer")
    return [
        Panel(
            "Held by each of 4 devices, MB: a Transformer, Adam",
            [Bar(name, held[name]["held by a device"], name != "mirrored") for name in names],
        ),
        Panel(
            "Millions of weights that fit into 3000 MB",
            [Bar(name, row["million parameters"], name != "mirrored") for name, row in largest.items()],
        ),
    ]


def gpu() -> list[Panel]:
    ((card, found),) = saved("gpu").items()
    bars = []
    for name, line in found["parts"]["fast"]["lines"].items():
        if times := line.get("values", {}).get("milliseconds"):
            bars.append(
                Bar(name.removeprefix("accumulation with Adam: "), times["AccumulatingOptimizer"] / times["Keras"])
            )
    return [Panel(f"Accumulation on one {card}, to Keras's own", bars, reference=1.0)]


def recompute() -> list[Panel]:
    memory, times = rows_of("recompute", "Peak memory"), rows_of("recompute", "Milliseconds a step, jit off")
    return [
        Panel(
            "Peak memory, MB: a Transformer of 12 blocks",
            [Bar(name, row["jit off"], name != "plain") for name, row in memory.items()],
        ),
        Panel(
            "A step, to the plain one",
            [Bar(name, row["to plain"], name != "plain") for name, row in times.items()],
            reference=1.0,
        ),
    ]


MODELS = ("MLP", "CNN", "Transformer")


def per_example() -> list[Panel]:
    others = rows_of("per_example", "The gradient of every example")["clipped: Opacus, ghost"]
    theirs = list(others.values())[2:]
    return [_beside("A clipped step, to the plain one of its framework", "wrap", clipped_steps(), "Opacus", theirs)]


def _beside(title: str, name: str, ours: Sequence[float], other: str, theirs: Sequence[float]) -> Panel:
    """A panel of ratios by model: our component's, called `name`, and the `other` library's."""
    bars = []
    for model, mine, its in zip(MODELS, ours, theirs, strict=True):
        bars += [Bar(f"{model}: {other}", its, False), Bar(f"{model}: {name}", mine)]
    return Panel(title, bars, reference=1.0)


def privacy() -> list[Panel]:
    title = "A private step, to the plain one of its framework"
    return [_beside(title, "make_private", private_steps(), "Opacus", opacus_steps())]


def input_gradients() -> list[Panel]:
    row = rows_of("input_gradients", "Milliseconds for the Jacobians of 2048 rows")["8 in, 100 out"]
    names = (
        "input_jacobian",
        "JAX jacfwd",
        "torch jacfwd",
        "batch_jacobian",
        "JAX jacrev",
        "torch jacrev(chunk_size)",
        "tape loop",
    )
    bars = [Bar(name, row[name], name == "input_jacobian") for name in names]
    return [Panel("Milliseconds for the Jacobians of 2048 rows", bars)]


def profiling() -> list[Panel]:
    rows = rows_of("profiling", "MLP 784-512-512-10, batch of 128, Adam, jit off")
    names = ("Profiler, idle", "Throughput", "GradientTelemetry, every step", "TensorBoard of Keras")
    bars = [Bar(name, without_range(rows[name]["µs more (quartiles)"]), "TensorBoard" not in name) for name in names]
    (plain,) = {in_words(rows["plain"]["ms a step"])}
    return [Panel(f"Microseconds more a step, which takes {plain} ms", bars)]


def releases() -> list[Panel]:
    bars = [
        Bar(f"Keras {pair['keras'].partition('.dev')[0]}, TensorFlow {pair['tensorflow']}", float(works))
        for pair, works in zip(saved("releases").values(), working(), strict=True)
    ]
    return [Panel(f"Trainings that work, of {max(len(pair['cases']) for pair in saved('releases').values())}", bars)]


CHARTS: dict[str, Callable[[], list[Panel]]] = {
    "exactness": exactness,
    "accumulation": accumulation,
    "distribution": distribution,
    "sharding": sharding,
    "gpu": gpu,
    "recompute": recompute,
    "per_example": per_example,
    "privacy": privacy,
    "input_gradients": input_gradients,
    "profiling": profiling,
    "releases": releases,
}


def draw() -> None:
    """Writes all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name, panels in CHARTS.items():
        (PICTURES / f"{name}.svg").write_text(drawn(panels()))
