"""Writes the tables of README and the documentation from what the benchmarks have saved in `results/`.

`python benchmarks/tables.py` writes each table between its marks, `<!-- table: name -->` and `<!-- /table -->`; a test
fails if a page says something else. A new table is a function here, under its page and name in `TABLES`. It draws the
charts of `charts.py` as well.
"""

import functools
import itertools
import json
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- /table -->)", flags=re.DOTALL)
Row = Mapping[str, Any]


@functools.cache
def saved(name: str) -> dict[str, Any]:
    """What a benchmark has saved: the rows of each table, by title."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str, title: str) -> dict[str, Row]:
    """The rows of a benchmark's one table whose title begins with `title`, by their first cell."""
    (rows,) = (rows for each, rows in saved(name).items() if each.startswith(title))
    return {next(iter(row.values())).strip(): row for row in rows}


def in_words(value: object) -> str:
    """A cell as text; floats have two decimals below 10, one below 100, and none above."""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def without_range(ratio: str) -> float:
    """The median of what is saved as a median with its range."""
    return float(ratio.partition(" (")[0])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown; the first column is aligned to the left, and the others to the right."""
    lines = [[each or " " for each in head], ["---", *["---:"] * (len(head) - 1)]]
    lines += [[in_words(cell) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_saved(name: str, title: str) -> str:
    """A table with the rows and columns that the benchmark has saved."""
    rows = list(rows_of(name, title).values())
    return table(list(rows[0]), [list(row.values()) for row in rows])


def plans() -> str:
    """What `fit_memory` chose in each budget, beside the fastest way that fits."""
    cells = []
    for row in itertools.chain.from_iterable(saved("plan").values()):
        ways = f"{row['ways that fit']} of {row['ways']}"
        chosen = row["chosen"].partition(":")[0]
        budget = f"{row['model']}, {row['budget, MB']} MB"
        cells.append([row["devices"], budget, ways, chosen, row["over the fastest"], row["trials"]])
    return table(["devices", "model, memory", "ways that fit", "chosen", "seconds over the fastest", "trials"], cells)


def stock_errors() -> str:
    """What goes wrong in Keras alone: six rows of both tables of exactness."""
    windows = rows_of("exactness", "Largest difference from")
    replicas = rows_of("exactness_matrix", "Largest difference of")
    chosen = [
        ("accumulation, a last micro-batch of fewer rows", windows["an uneven last micro-batch"]),
        ("accumulation, weighted examples", windows["weighted examples, weighted mean"]),
        ("accumulation, a learning-rate schedule", windows["learning-rate schedule"]),
        ("accumulation on two replicas", windows["two replicas"]),
        ("two replicas, `clipnorm`", replicas["clip: clipnorm"]),
        ("two workers", replicas["replicas: 2 workers"]),
    ]
    return table(["", "Keras", "keras_paragrad"], [[name, *list(row.values())[1:]] for name, row in chosen])


def cells_title() -> str:
    """The title of the sample of combined settings, which begins with their number."""
    (title,) = (each for each in saved("exactness_matrix") if " cells: " in each)
    return title


def trust() -> str:
    """In a sentence, how many combinations of settings hold, and how many planted faults the tests find."""
    rows = rows_of("exactness_matrix", cells_title())
    cells = [row["hold"].split(" of ") for name, row in rows.items() if name.startswith("replicas: ")]
    hold, tried = (sum(int(each[place]) for each in cells) for place in (0, 1))
    off = rows["precision: float32"]["largest difference"]
    planted = runpy.run_path(str(ROOT / "tests" / "mutants" / "faults.py"))["FAULTS"]
    # A fault that was not planted since it was added counts as not found.
    found = sum(bool(saved("mutants").get(fault.name, {}).get("found by")) for fault in planted)
    return (
        f"In {_share(hold, tried)} tested combinations of devices, optimizers, clipping, batches, weights, precision,\n"
        "XLA, accumulation and shards, training\n"
        "[ends with the weights of one device](docs/benchmarks/exactness.md): in float32 they differ by at most\n"
        f"{off}. The tests find {_share(found, len(planted))} faults that are\n"
        "[planted](CONTRIBUTING.md#how-oracles-work) in the package on purpose.\n"
    )


def _share(part: int, whole: int) -> str:
    """Such as `217 of 218`, or `all 218`."""
    return f"all {whole}" if part == whole else f"{part} of {whole}"


def on_gpu() -> float:
    """The time of an accumulated micro-batch on one H200, to Keras's own."""
    line = saved("gpu")["NVIDIA H200"]["parts"]["fast"]["lines"]["accumulation with Adam: MLP, k=4"]
    return line["values"]["milliseconds"]["AccumulatingOptimizer"] / line["values"]["milliseconds"]["Keras"]


def on_replicas() -> float:
    """The time of a step on two replicas, to `MirroredStrategy`'s."""
    title = "A step on 2 replicas, MLP 784-512-512-10, batch of 128; gradients are added up on one"
    return without_range(rows_of("distribution", title)["Adam"]["ours to stock, at most 1"])


def on_workers() -> float:
    """The time of a step on two workers, to half the step and the all-reduce, each alone."""
    return without_range(rows_of("distribution", "Two workers on a ring")["the step to the sum of the two"]["ms"])


def clipped_steps() -> list[float]:
    """The times of steps that clip per example, to plain ones: MLP, CNN, Transformer."""
    rows = saved("per_example")["A step of fit, in plain steps"]
    return [row["jit off"] for row in rows if row[""].strip() == "clipped update"]


def private_steps() -> list[float]:
    """The times of private steps, to plain ones: MLP, CNN, Transformer."""
    rows = rows_of("privacy", "A step of 1024 examples in fit")
    column = "make_private, four physical batches, to plain"
    return [rows[f"{model}, jit off"][column] for model in ("mlp", "cnn", "transformer")]


def opacus_steps() -> list[float]:
    """The times of private steps of Opacus, to plain ones in PyTorch: MLP, CNN, Transformer."""
    rows = [row for row in saved("privacy")["A step in other libraries"] if row["examples"] == 1024]
    return [row["private, four physical batches, to plain"] for row in rows if row[""].startswith("Opacus")]


def working() -> list[int]:
    """How many trainings of components work on each pair of releases, from the oldest to the newest."""
    return [sum("error" not in each for each in pair["cases"].values()) for pair in saved("releases").values()]


def costs() -> str:
    """What components cost, beside what each is compared with; also where they are slower."""
    accumulation = rows_of("accumulation", "Milliseconds a micro-batch of 64")
    contrastive = rows_of("contrastive", "Milliseconds a step, jit off")
    recomputed = rows_of("recompute", "Milliseconds a step, jit off")
    memory = rows_of("recompute", "Peak memory")
    auto = 'recompute(model, "auto")'
    return table(
        ["", "compared with", "ratio"],
        [
            ["accumulation of 4, XLA", "Keras's own", accumulation["jit on, k=4"]["to built-in"]],
            ["accumulation of 4, without XLA", "Keras's own", accumulation["jit off, k=4"]["to built-in"]],
            ["accumulation of 4, XLA, one H200", "Keras's own", on_gpu()],
            ["two replicas", "`MirroredStrategy`", on_replicas()],
            ["two workers", "half the step and the all-reduce, each alone", on_workers()],
            ["clipping per example: MLP, CNN, Transformer", "the plain step", _list(clipped_steps())],
            ["`make_private`: MLP, CNN, Transformer", "the plain step", _list(private_steps())],
            ["Opacus: the same, in PyTorch", "its plain step", _list(opacus_steps())],
            [
                f"`recompute(model)`: Transformer, {memory[auto]['saved, jit off']} less memory",
                "the plain step",
                recomputed[auto]["to plain"],
            ],
            [
                "a loss that compares examples, in slices",
                "slices of a loss that doesn't",
                contrastive["microbatch(size=64)"]["to plain slices, CPU time"],
            ],
        ],
    )


def main_numbers() -> str:
    """One or two numbers of each benchmark."""
    cells = rows_of("exactness_matrix", cells_title())
    accumulation = rows_of("accumulation", "Milliseconds a micro-batch of 64")["jit on, k=4"]
    slices, held = rows_of("memory", "Peak memory"), rows_of("sharding", "Memory of training a Transformer")
    memory, times = rows_of("recompute", "Peak memory"), rows_of("recompute", "Milliseconds a step, jit off")
    auto, parameters = 'recompute(model, "auto")', held['shard="parameters"']
    jacobians = rows_of("input_gradients", "Milliseconds for the Jacobians of 2048 rows")["8 in, 100 out"]
    watched = rows_of("profiling", "MLP 784-512-512-10, batch of 128, Adam, jit off")
    tried = max(len(pair["cases"]) for pair in saved("releases").values())
    rows = [
        (
            "exactness",
            "combined settings, the largest difference in float32",
            cells["precision: float32"]["largest difference"],
        ),
        ("accumulation", "a micro-batch under XLA, to Keras's own", accumulation["to built-in"]),
        (
            "accumulation",
            "memory of a batch of 4096 in slices of 512",
            f"{slices['microbatch(512), batch of 4096']['jit off']} of {slices['one batch of 4096']['jit off']} MB",
        ),
        ("distribution", "a step on two replicas, to `MirroredStrategy`'s", on_replicas()),
        ("distribution", "a step on two workers, to half the step and the all-reduce alone", on_workers()),
        (
            "sharding",
            "held by each of four devices",
            f"{parameters['held by a device']} of {held['mirrored']['held by a device']} MB",
        ),
        ("gpu", "a micro-batch under XLA on one H200, to Keras's own", on_gpu()),
        ("recompute", "memory of a Transformer", f"{memory[auto]['jit off']} of {memory['plain']['jit off']} MB"),
        ("recompute", "its step, to the plain one", times[auto]["to plain"]),
        ("per_example", "a clipped step, to the plain one: MLP, CNN, Transformer", _list(clipped_steps())),
        ("privacy", "a private step, to the plain one: MLP, CNN, Transformer", _list(private_steps())),
        (
            "input_gradients",
            "Jacobians, 8 in and 100 out, to `batch_jacobian`'s",
            1 / jacobians["batch_jacobian to ours"],
        ),
        ("profiling", "telemetry every step, of a step", watched["GradientTelemetry, every step"]["of plain"]),
        (
            "releases",
            "trainings that work on the oldest and the newest pair",
            f"{working()[0]} and {working()[-1]} of {tried}",
        ),
    ]
    return table(["", "number"], [[f"[{NAMES[each]}]({link(each)}): {what}", number] for each, what, number in rows])


# What a benchmark is called in links.
NAMES = {
    "exactness": "Exactness",
    "accumulation": "Accumulation",
    "distribution": "Distributed training",
    "sharding": "Models in shards",
    "gpu": "On a GPU",
    "recompute": "Recomputation",
    "per_example": "Per-example gradients",
    "privacy": "Private training",
    "input_gradients": "Input gradients",
    "profiling": "Profiling",
    "releases": "Releases",
}
# Where it is, unless it has a page of its name.
SECTIONS = {
    "recompute": "accumulation.md#recomputation",
    "input_gradients": "per_example.md#input-gradients",
    "profiling": "../guides/profiling.md#what-it-costs",
}


def link(benchmark: str) -> str:
    """A link to a benchmark from the first page of all."""
    return SECTIONS.get(benchmark, f"{benchmark}.md")


def _list(values: Sequence[float]) -> str:
    return ", ".join(in_words(value) for value in values)


def exactness_of_distribution() -> str:
    """The difference from one device for each setting of the matrix."""
    rows = rows_of("exactness_matrix", "Largest difference of")
    return table(
        ["", "Keras", "`DistributedFit`"],
        [[name, *list(row.values())[1:]] for name, row in rows.items()],
    )


def exactness_of_accumulation() -> str:
    """The difference from whole batches for each setting of accumulation."""
    rows = rows_of("exactness", "Largest difference from")
    head = ["", "`gradient_accumulation_steps=4`", "`AccumulatingOptimizer`"]
    return table(head, [[name, *list(row.values())[1:]] for name, row in rows.items()])


def processor_times(name: str, what: str) -> str:
    """Milliseconds of processor time without and with XLA, each beside its ratio to the base case.

    `what` is how the tables' titles go on.
    """
    without, by_xla = (rows_of(name, f"Milliseconds a step, jit {jit}: {what}") for jit in ("off", "on"))
    *_, ratio = next(iter(without.values()))
    head = ["", "jit off", ratio.removesuffix(", CPU time"), "jit on", ratio.removesuffix(", CPU time")]
    return table(
        head,
        [[case, *(cell for rows in (without, by_xla) for cell in list(rows[case].values())[3:])] for case in without],
    )


def releases() -> str:
    """By component, the largest difference from one device on whole batches, on each pair of releases."""
    pairs = saved("releases")
    columns = [f"{each['keras'].partition('.dev')[0]}, {each['tensorflow']}" for each in pairs.values()]
    names = dict.fromkeys(name for each in pairs.values() for name in each["cases"])
    rows = [[name, *(_found(each["cases"].get(name)) for each in pairs.values())] for name in names]
    return table(["Keras, TensorFlow", *columns], rows)


def _found(result: Row | None) -> str:
    """A case's difference, or the error that refuses it; nothing for a case that wasn't run."""
    if result is None:
        return ""
    return (
        result["error"].replace("|", "\\|")
        if "error" in result
        else f"{result['difference']:.0e}".replace("0e+00", "0")
    )


def backups(disk: str) -> str:
    """How long training waits for a backup on the `"fast"` or `"slow"` disk."""
    rows = rows_of("backups", f"2 backups of a model of 200 MB with Adam, every 20 steps, {disk} disk")
    columns = ["seconds blocked by one", "% of training"]
    return table(
        ["", *columns],
        [[name, *(f"{row[each]:.2g}" for each in columns)] for name, row in rows.items() if row[columns[0]]],
    )


def soak() -> str:
    """The results of trainings whose workers and machines were lost and joined again."""
    (rows,) = saved("soak").values()
    head = ["", "trainings", "disturbances", "worlds", "largest difference"]
    errors = [f"{row['error']:.0e}".replace("0e+00", "0") for row in rows]
    cells = zip(rows, errors, strict=True)
    return table(head, [[*(row[name] for name in ["", *head[1:4]]), error] for row, error in cells])


def worlds() -> str:
    """For each form and sequence of worlds, the difference from one device, and the digest of deterministic training.

    A world is a process with a number of replicas, and a form is a kind of model or of training.
    """
    (forms,) = saved("worlds").values()
    rows = []
    for form, sequences in forms.items():
        for name, found in sequences.items():
            alike = found["digest"] == sequences["1"]["digest"] and found["history is the same"]
            error = f"{found['error']:.0e}".replace("0e+00", "0")
            rows.append([form, name, error, f"`{found['digest'][0][:12]}`", "yes" if alike else "no"])
    head = [
        "form",
        "replicas",
        "difference from one device",
        "weights, deterministic",
        "optimizer, data, history alike",
    ]
    return table(head, rows)


def installation() -> str:
    """For each pair of releases, the seconds from an empty environment to the end of README's first script."""
    steps = ("download", "install", "script")
    rows = [
        [
            f"{each['keras'].partition('.dev')[0]}, {each['tensorflow']}",
            *(f"{each['bytes'][step] / 1e6:.0f}" for step in steps[:2]),
            *(f"{each[step]['seconds']:.0f}" for step in steps),
            f"{sum(each[step]['seconds'] for step in steps):.0f}",
            f"{sum(each[step]['processor seconds'] for step in steps):.0f}",
        ]
        for each in saved("installation").values()
    ]
    sizes, seconds = ["MB downloaded", "MB installed"], ["download, s", "installation, s", "script, s", "all, s"]
    return table(["Keras, TensorFlow", *sizes, *seconds, "processor time, s"], rows)


# By page and by the name of a table in it, the function that returns the table.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"trust": trust, "stock Keras": stock_errors, "costs": costs},
    "docs/index.md": {"stock Keras": stock_errors},
    "docs/benchmarks/exactness.md": {
        "accumulation": exactness_of_accumulation,
        "distribution": exactness_of_distribution,
        "cells": lambda: as_saved("exactness_matrix", cells_title()),
    },
    "docs/benchmarks/releases.md": {"releases": releases, "installation": installation},
    "docs/benchmarks/sharding.md": {"plans": plans},
    "docs/guides/fault_tolerance.md": {"soak": soak},
    "docs/guides/deterministic.md": {
        "worlds": worlds,
        "cost": functools.partial(as_saved, "deterministic", "Milliseconds a step"),
    },
    "docs/benchmarks/distribution.md": {
        "backups": functools.partial(backups, "fast"),
        "slow backups": functools.partial(backups, "slow"),
    },
    "docs/benchmarks/index.md": {
        "main": main_numbers,
        "startup of a CNN": functools.partial(as_saved, "startup", "Seconds to the end of the first update: CNN"),
        "startup of a Transformer": functools.partial(
            as_saved, "startup", "Seconds to the end of the first update: Transformer"
        ),
    },
    "docs/benchmarks/accumulation.md": {
        "dense": functools.partial(as_saved, "accumulation", "Milliseconds a micro-batch of 64"),
        "embedding": functools.partial(as_saved, "accumulation", "Milliseconds a micro-batch of 32"),
        "memory": functools.partial(as_saved, "memory", "Peak memory"),
        "memory of contrastive": functools.partial(as_saved, "contrastive", "Peak memory"),
        "contrastive": functools.partial(processor_times, "contrastive", "SimCLR"),
        "own steps": functools.partial(processor_times, "custom_steps", "MLP"),
        "two networks": functools.partial(processor_times, "custom_steps", "GAN"),
    },
}


def written(page: str, text: str) -> str:
    """A page's text with its tables made anew from what is saved.

    Raises:
        KeyError: The page has marks of a table that is not in `TABLES`.
    """
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[page][found[2]]()}{found[3]}", text)


def main() -> None:
    import charts

    charts.draw()
    for page in TABLES:
        path = ROOT / page
        path.write_text(written(page, path.read_text()))


if __name__ == "__main__":
    main()
