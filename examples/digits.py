"""Trains a digit classifier on whole batches, in micro-batches and on two replicas: all end with the same weights.

Run it with `make demo`, or with `python examples/digits.py` where the `demo` extra is installed. The report shows where
the time of the replicas' steps goes. It takes a minute on two CPU cores.
"""

import json
import shlex
import sys
import time
from pathlib import Path

from _child import ChildError, messages, run
from _example import Progress, options, require

require("sklearn", "tensorboard", "xprof")

import numpy as np
from rich.console import Console
from rich.table import Table

EPOCHS, SHORT = 10, 2
TRAININGS = {
    "whole": {"title": "batches of 256", "batch_size": 256, "steps": 1, "replicas": 1},
    "accumulated": {"title": "8 micro-batches of 32", "batch_size": 32, "steps": 8, "replicas": 1},
    "replicas": {"title": "2 replicas, 4 of 64", "batch_size": 64, "steps": 4, "replicas": 2},
}
ROWS = {
    "accuracy": ("accuracy in validation", "{:.2%}"),
    "updates": ("updates made", "{}"),
    "batches": ("batches run", "{}"),
    "seconds": ("seconds, compiling included", "{:.1f}"),
    "peak_megabytes": ("peak memory of the process, MB", "{:.0f}"),
    "megabytes_of_training": ("of which training took, MB", "{:.0f}"),
}


def train(name, folder, epochs):
    """Runs one training in a process of its own, and returns its results and its weights."""
    training = TRAININGS[name]
    folder.mkdir(parents=True)
    command = [sys.executable, Path(__file__).with_name("_training_run.py"), "--folder", folder, "--epochs", epochs]
    for option in ("batch_size", "steps", "replicas"):
        command += ["--" + option.replace("_", "-"), training[option]]
    with Progress(training["title"], epochs, "epochs") as progress:
        for _ in messages(command, errors=folder / "errors.log"):
            progress.advance()
    with np.load(folder / "weights.npz") as saved:
        weights = [saved[name] for name in saved.files]
    return json.loads((folder / "results.json").read_text()), weights


def profile(folder):
    """Looks at a few epochs on replicas, in a process that prints what it saw."""
    folder.mkdir()
    with Progress("The replicas once more, seen from inside"):
        run([sys.executable, Path(__file__).with_name("_profiled_run.py"), folder], errors=folder / "errors.log")


def largest_difference(ones, others):
    """The largest absolute difference between two models' weights, which is NaN if any weight is."""
    return float(np.max([np.abs(one - other).max() for one, other in zip(ones, others, strict=True)]))


def differences(trained):
    """By training, how far its weights are from those of whole batches."""
    weights = {name: weights for name, (_, weights) in trained.items()}
    whole = weights.pop("whole")
    return {name: largest_difference(whole, others) for name, others in weights.items()}


def allowed_difference(updates):
    """How far apart rounding alone may take two trainings of as many updates."""
    # The largest weights, GroupNormalization's scales, are just above 1, where float32 numbers are this far apart. Each
    # update may round one training's weight up and the other's down.
    return updates * float(np.finfo(np.float32).eps)


def results_table(results, found):
    """What the trainings came to, side by side."""
    table = Table("", *(training["title"] for training in TRAININGS.values()))
    for key, (title, form) in ROWS.items():
        table.add_row(title, *(form.format(results[name][key]) for name in TRAININGS))
    table.add_row("largest weight difference", "", *(f"{difference:.1e}" for difference in found.values()))
    return table


def verdict(held, difference, updates):
    """Whether the promise held, as a sentence."""
    rounding = f"float32 rounding explains up to {allowed_difference(updates):.1e}"
    if held:
        return f"The promise held: after {updates} updates the weights are the same to {difference:.1e}; {rounding}."
    return f"The promise is broken: after {updates} updates a weight differs by {difference:.1e}; {rounding}."


def shortest(path):
    """A path, as short as the current directory allows."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def viewing_command(folder):
    """The command that shows the logs."""
    return shlex.join([shortest(Path(sys.executable).with_name("tensorboard")), "--logdir", shortest(folder)])


def main():
    """Runs the demo, and returns the exit status."""
    given = options(__doc__, takes="a minute")
    console = Console(highlight=False)
    folder = given.folder / time.strftime("%Y%m%d-%H%M%S")
    try:
        # One after the other, so that none takes another's time.
        trained = {name: train(name, folder / name, SHORT if given.short else EPOCHS) for name in TRAININGS}
        results = {name: result for name, (result, _) in trained.items()}
        console.print((folder / "replicas" / "explanation.txt").read_text(), markup=False, soft_wrap=True)
        profile(folder / "profiled")
    except ChildError as failure:
        console.print(str(failure), markup=False, soft_wrap=True)
        return 1
    found = differences(trained)
    difference = float(np.max(list(found.values())))
    updates = results["accumulated"]["updates"]
    held = difference <= allowed_difference(updates)
    console.print(results_table(results, found))
    console.print(f"All of them in TensorBoard: {viewing_command(folder)}", markup=False, soft_wrap=True)
    console.print(verdict(held, difference, updates), soft_wrap=True)
    report = folder / "profiled" / "report.html"
    console.print(f"The report, to open in a browser: {shortest(report)}", markup=False, soft_wrap=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
