"""What the examples share: a sentence for what isn't installed, what they print while they train, and pictures."""

import argparse
import importlib.util
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


# The first series is drawn wide, so that one that equals it is seen on top of it.
WIDTHS = (7, 2, 2)
COLORS = ("#9ec5f4", "#b35900", "#1f6feb")


def _figure(title: str, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), dpi=100, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=14)
    return figure


def save(figure, path: Path, shows: str) -> None:
    """Writes a picture, and says what it shows and where it is."""
    figure.savefig(path)
    print(f"{shows}\nThe picture: {path}", flush=True)


def image_grid(title: str, images, captions, columns: int, rows=()):
    """Grey images, each with a line above, and perhaps a name at the left of each row.

    Args:
        title: The title.
        images: Arrays of 8 x 8, from 0 for white to 1.
        captions: A line for each.
        columns: How many images make a row.
        rows: The names of the rows.
    """
    height = -(-len(images) // columns)
    figure = _figure(title, 0.6 + height * 9 / columns)
    axes = figure.subplots(height, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    for axis, image, caption in zip(axes.flat, images, captions, strict=False):
        axis.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(caption, fontsize=10)
    for axis, name in zip(axes[:, 0], rows, strict=False):
        axis.set_ylabel(name, rotation="horizontal", ha="right", va="center", fontsize=11)
    return figure


def bars(title: str, values: dict[str, float], form: str, limit: tuple[str, float] | None = None):
    """A bar for each value, with its name and number, and perhaps a limit.

    Args:
        title: The title, with the unit.
        values: By name.
        form: How a value is written, as in `"{:.0f} MB"`.
        limit: Its name and value.
    """
    figure = _figure(title, 1 + 0.6 * len(values) + (0.4 if limit else 0))
    axis = figure.subplots()
    colors = [COLORS[1] if limit and value > limit[1] else COLORS[2] for value in values.values()]
    axis.bar_label(axis.barh(list(values), list(values.values()), 0.6, color=colors), fmt=form.format, padding=6)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    if limit:
        axis.axvline(limit[1], color="black")
        axis.set_xticks([limit[1]], [f"{limit[0]}: {form.format(limit[1])}"])
    return figure


def lines(title: str, x: tuple[str, list[str]], y: str, series: dict[str, list[float]], form: str):
    """A line for each series, through points at equal distances.

    Args:
        title: The title.
        x: What the points are, and each one's label.
        y: What the values are.
        series: Values by name.
        form: How a value is written.
    """
    figure = _figure(title, 4.8)
    axis = figure.subplots()
    for (name, values), color, width in zip(series.items(), COLORS, WIDTHS, strict=False):
        axis.plot(x[1], values, color=color, linewidth=width, marker="o", markersize=width + 4, label=name)
    axis.set(xlabel=x[0], ylabel=y)
    axis.yaxis.set_major_formatter(form.format)
    axis.grid(axis="y")
    axis.legend(frameon=False)
    return figure
