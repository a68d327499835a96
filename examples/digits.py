"""Trains a digit classifier on whole batches and in micro-batches, and shows that both end with the same weights.

Run it with `make demo`, or with `python examples/digits.py` where the `demo` extra is installed.
"""

import json
import shlex
import sys
import time
from pathlib import Path

import numpy as np
from _child import ChildError, messages
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EPOCHS = 10
TRAININGS = {
    "whole": {"title": "batches of 256", "batch_size": 256, "steps": 1},
    "accumulated": {"title": "8 micro-batches of 32", "batch_size": 32, "steps": 8},
}
ROWS = {
    "accuracy": ("accuracy in validation", "{:.2%}"),
    "updates": ("updates made", "{}"),
    "batches": ("batches run", "{}"),
    "seconds": ("seconds, compiling included", "{:.1f}"),
    "peak_megabytes": ("peak memory of the process, MB", "{:.0f}"),
    "megabytes_of_training": ("of which training took, MB", "{:.0f}"),
}


def train(name, folder, progress):
    """Runs one training in a process of its own, and returns its results and its weights."""
    training = TRAININGS[name]
    task = progress.add_task(training["title"], total=EPOCHS, note="starting TensorFlow")
    folder.mkdir(parents=True)
    command = [sys.executable, Path(__file__).with_name("_training_run.py"), "--folder", folder, "--epochs", EPOCHS]
    command += ["--batch-size", training["batch_size"], "--steps", training["steps"]]
    for message in messages(command, errors=folder / "errors.log"):
        note = f"accuracy {message['accuracy']:.3f}"
        progress.update(task, completed=message["epoch"], note=note)
    with np.load(folder / "weights.npz") as saved:
        weights = [saved[name] for name in saved.files]
    return json.loads((folder / "results.json").read_text()), weights


def train_both(folder, console):
    """Runs the trainings one after the other, so that neither takes the other's time."""
    columns = TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        return {name: train(name, folder / name, progress) for name in TRAININGS}


def largest_difference(ones, others):
    """The largest absolute difference between two models' weights, which is NaN if any weight is."""
    return float(np.max([np.abs(one - other).max() for one, other in zip(ones, others, strict=True)]))


def allowed_difference(updates):
    """How far apart rounding alone may take two trainings of as many updates."""
    # The largest weights, GroupNormalization's scales, are just above 1, where float32 numbers are this far apart. Each
    # update may round one training's weight up and the other's down.
    return updates * float(np.finfo(np.float32).eps)


def results_table(results, difference):
    """What the trainings came to, side by side."""
    table = Table("", *(training["title"] for training in TRAININGS.values()))
    for key, (title, form) in ROWS.items():
        table.add_row(title, *(form.format(results[name][key]) for name in TRAININGS))
    table.add_row("largest weight difference", "", f"{difference:.1e}")
    return table


def verdict(held, difference, updates):
    """Whether the promise held, as a sentence."""
    rounding = f"float32 rounding explains up to {allowed_difference(updates):.1e}"
    if held:
        return f"The promise held: after {updates} updates the weights are the same to {difference:.1e}; {rounding}."
    return f"The promise is broken: after {updates} updates a weight differs by {difference:.1e}; {rounding}."


def viewing_command(folder):
    """The command that shows the logs, as short as the current directory allows."""
    paths = Path(sys.executable).with_name("tensorboard"), folder
    here = Path.cwd()
    program, logs = (str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths)
    return shlex.join([program, "--logdir", logs])


def main():
    """Runs the demo, and returns the exit status."""
    console = Console(highlight=False)
    folder = Path.cwd() / "runs" / time.strftime("digits-%Y%m%d-%H%M%S")
    console.print(
        "Training one digit classifier twice, on whole batches and on the same batches in parts.", soft_wrap=True
    )
    try:
        trained = train_both(folder, console)
    except ChildError as failure:
        console.print(str(failure), markup=False, soft_wrap=True)
        return 1
    results = {name: result for name, (result, _) in trained.items()}
    difference = largest_difference(*(weights for _, weights in trained.values()))
    updates = results["accumulated"]["updates"]
    held = difference <= allowed_difference(updates)
    console.print(results_table(results, difference))
    console.print(verdict(held, difference, updates), soft_wrap=True)
    console.print(f"To see both in TensorBoard: {viewing_command(folder)}", markup=False, soft_wrap=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
