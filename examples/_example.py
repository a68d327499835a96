"""What the examples share: a sentence for what isn't installed, what they print while they train, and pictures."""

import argparse
import importlib.util
import math
import os
import sys
import threading
import time
from pathlib import Path

# Of TensorFlow's log, errors alone; and the backend that this package is for, whatever the user's own settings say.
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
os.environ.update(ENVIRONMENT)

SECONDS_BETWEEN_LINES = 5


def require(*packages: str) -> None:
    """Ends the program with a sentence if packages that it imports are not installed."""
    missing = [each for each in ("keras_paragrad", *packages) if importlib.util.find_spec(each) is None]
    if missing:
        *others, last = missing
        names = f"{', '.join(others)} and {last}, which are" if others else f"{last}, which is"
        sys.exit(f"{Path(sys.argv[0]).name} needs {names} not installed. Run pip install 'keras_paragrad[demo]'.")


def options(description: str, takes: str, chief: bool = True) -> argparse.Namespace:
    """Reads the command line, says how long the example takes, and makes the folder for its picture.

    Args:
        description: The example's docstring.
        takes: How long it takes on two CPU cores.
        chief: Whether this process says so.

    Returns:
        Whether it is to be `short`, and the `folder`.
    """
    name = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--folder", type=Path, default=Path("runs", name), help="for its picture (default: runs/NAME)")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if chief:
        print(f"{name}.py takes {'half a minute, as it is short' if given.short else takes}.", flush=True)
    return given


class Progress:
    """Says every few seconds what is under way, how far it is and since when; and in the end, how long it took."""

    def __init__(self, title: str, total: int = 0, unit: str = "batches"):
        self.title, self.total, self.unit, self.done = title, total, unit, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._began = time.perf_counter()
        self._say("begins")
        self._thread.start()
        return self

    def __exit__(self, kind, error, traceback):
        self._ended.set()
        self._thread.join()
        if kind is None:
            self._say(f"done in {self._seconds()}")

    def advance(self) -> None:
        """Counts one more."""
        self.done += 1

    def callback(self):
        """A callback of Keras that counts batches."""
        import keras

        return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: self.advance())

    def _seconds(self) -> str:
        return f"{time.perf_counter() - self._began:.0f} s"

    def _run(self) -> None:
        # A thread, as the first batch of a training traces and compiles for longer than that.
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            done = f"{self.done} of {self.total} {self.unit}, " if self.total else ""
            self._say(f"{done}{self._seconds()}")

    def _say(self, what: str) -> None:
        print(f"{self.title}: {what}", flush=True)


# Drawn larger than shown, for smooth lines.
SCALE, WIDTH, MARGIN, LINE = 2, 900, 24, 24
INK, GREY = "#222222", "#cccccc"
COLORS = ("#9ec5f4", "#b35900", "#1f6feb")


class Picture:
    """A white picture with a title, and room below it."""

    def __init__(self, title: str, height: int):
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (SCALE * WIDTH, SCALE * height), "white")
        self._draw = ImageDraw.Draw(self.image)
        self.text(MARGIN, MARGIN + LINE / 2, title, size=19)

    def text(self, x: float, y: float, text: str, anchor: str = "lm", size: int = 15) -> float:
        """Writes a line, and returns how wide it is."""
        from PIL import ImageFont

        font = ImageFont.load_default(SCALE * size)
        self._draw.text((SCALE * x, SCALE * y), text, INK, font, anchor=anchor)
        return font.getlength(text) / SCALE

    def box(self, left: float, top: float, right: float, bottom: float, color: str) -> None:
        """Fills a rectangle."""
        self._draw.rectangle([SCALE * each for each in (left, top, right, bottom)], color)

    def line(self, points, color: str, width: float = 1) -> None:
        """Draws a line through points."""
        self._draw.line([(SCALE * x, SCALE * y) for x, y in points], color, round(SCALE * width), joint="curve")

    def dot(self, x: float, y: float, radius: float, color: str) -> None:
        """Draws a filled circle."""
        self._draw.ellipse(
            [SCALE * (x - radius), SCALE * (y - radius), SCALE * (x + radius), SCALE * (y + radius)], color
        )

    def save(self, path: Path, shows: str) -> None:
        """Writes the file, and says what it shows and where it is."""
        self.image.resize((WIDTH, self.image.height // SCALE)).save(path)
        print(f"{shows}\nThe picture: {path}", flush=True)


def image_grid(title: str, images, captions, columns: int, rows=()) -> Picture:
    """Grey images, each with a line below, and perhaps a name at the left of each row.

    Args:
        title: The title.
        images: Arrays of 8 x 8, from 0 for white to 1.
        captions: A line for each.
        columns: How many images make a row.
        rows: The names of the rows.
    """
    from PIL import Image

    left = MARGIN + (130 if rows else 0)
    across = (WIDTH - left - MARGIN) / columns
    side, below = round(across) - 14, LINE if any(captions) else 0
    down = side + 14 + below
    picture = Picture(title, round(MARGIN + 2 * LINE + down * -(-len(images) // columns) + MARGIN))
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(index, columns)
        x, y = left + column * across, MARGIN + 2 * LINE + row * down
        pixels = Image.fromarray((255 * (1 - image.clip(0, 1))).astype("uint8"))
        picture.image.paste(
            pixels.resize((SCALE * side, SCALE * side), Image.Resampling.NEAREST), (round(SCALE * x), round(SCALE * y))
        )
        picture.text(x + side / 2, y + side + LINE / 2, caption, anchor="mm")
    for row, name in enumerate(rows):
        picture.text(MARGIN, MARGIN + 2 * LINE + row * down + side / 2, name)
    return picture


def bars(title: str, values: dict[str, float], form: str, limit: tuple[str, float] | None = None) -> Picture:
    """A bar for each value, with its name and number, and perhaps a limit.

    Args:
        title: The title, with the unit.
        values: By name.
        form: How a value is written, as in `"{:.0f} MB"`.
        limit: Its name and value.
    """
    down = 2 * LINE
    picture = Picture(title, MARGIN + 2 * LINE + down * len(values) + (2 * LINE if limit else MARGIN))
    left, right, top = MARGIN + 250, WIDTH - MARGIN - 90, MARGIN + 2 * LINE
    scale = (right - left) / max([*values.values(), *([limit[1]] if limit else [])])
    for number, (name, value) in enumerate(values.items()):
        y = top + number * down
        color = COLORS[1] if limit and value > limit[1] else COLORS[2]
        picture.text(left - 12, y + 16, name, anchor="rm")
        picture.box(left, y, left + value * scale, y + 32, color)
        picture.text(left + value * scale + 8, y + 16, form.format(value))
    if limit:
        x, bottom = left + limit[1] * scale, top + down * len(values)
        picture.line([(x, top - 8), (x, bottom)], INK, 2)
        picture.text(x, bottom + LINE / 2, f"{limit[0]}: {form.format(limit[1])}", anchor="mm")
    return picture


def _marks(values: list[float]) -> list[float]:
    """Round numbers, at equal distances, that have the values between them."""
    span = (max(values) - min(values)) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * each for each in (0.2, 0.5, 1, 2) if span <= 5 * power * each)
    first, last = math.floor(min(values) / step), math.ceil(max(values) / step)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def lines(title: str, x: tuple[str, list[str]], y: str, series: dict[str, list[float]], form: str) -> Picture:
    """A line for each series, through points at equal distances.

    Args:
        title: The title.
        x: What the points are, and each one's label.
        y: What the values are.
        series: Values by name. The first is drawn wide, so that one that equals it is seen on top of it.
        form: How a value is written.
    """
    picture = Picture(title, 480)
    left, right, top, bottom = MARGIN + 80, WIDTH - MARGIN - 20, MARGIN + 4 * LINE, 480 - MARGIN - 2.5 * LINE
    marks = _marks([value for values in series.values() for value in values])
    low, high = marks[0], marks[-1]

    def place(number: int, value: float) -> tuple[float, float]:
        across = 20 + number * (right - left - 40) / max(len(x[1]) - 1, 1)
        return left + across, bottom - (value - low) / (high - low) * (bottom - top)

    for value in marks:
        height = place(0, value)[1]
        picture.line([(left, height), (right, height)], GREY)
        picture.text(left - 8, height, form.format(value), anchor="rm")
    for number, label in enumerate(x[1]):
        picture.text(place(number, low)[0], bottom + 18, label, anchor="mm")
    picture.text((left + right) / 2, bottom + 44, x[0], anchor="mm")
    legend = MARGIN + picture.text(MARGIN, MARGIN + 2 * LINE, f"{y}:") + 20
    for number, (name, values) in enumerate(series.items()):
        color, width = COLORS[number], 7 if number == 0 else 2
        points = [place(*point) for point in enumerate(values)]
        picture.line(points, color, width)
        for point in points:
            picture.dot(*point, width / 2 + 3, color)
        picture.line([(legend, MARGIN + 2 * LINE), (legend + 30, MARGIN + 2 * LINE)], color, width)
        legend += 38 + picture.text(legend + 38, MARGIN + 2 * LINE, name) + 30
    return picture
