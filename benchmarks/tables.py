"""Writes the tables of README and the documentation from what the benchmarks have saved in `results/`.

`python benchmarks/tables.py` writes each table between its marks, `<!-- table: name -->` and `<!-- /table -->`; a test
fails if a page says something else. A new table is a function here, under its page and name in `TABLES`.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- /table -->)", flags=re.DOTALL)
Row = Mapping[str, Any]


@functools.cache
def saved(name: str) -> dict[str, Any]:
    """What a benchmark has saved: by title, rows."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str, title: str) -> dict[str, Row]:
    """The rows of the one table whose title begins so, by their first cell."""
    (rows,) = (rows for each, rows in saved(name).items() if each.startswith(title))
    return {next(iter(row.values())).strip(): row for row in rows}


def in_words(value: object) -> str:
    """A number with two or three digits."""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def without_range(ratio: str) -> float:
    """The median of what is saved as a median with its range."""
    return float(ratio.partition(" (")[0])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, whose first column is text."""
    lines = [[each or " " for each in head], ["---", *["---:"] * (len(head) - 1)]]
    lines += [[in_words(cell) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_saved(name: str, title: str) -> str:
    """A table as the benchmark has printed it."""
    rows = list(rows_of(name, title).values())
    return table(list(rows[0]), [list(row.values()) for row in rows])


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
    """The title of the sample of combined settings, which begins with how many they are."""
    (title,) = (each for each in saved("exactness_matrix") if " cells: " in each)
    return title


def trust() -> str:
    """In a sentence, how many combinations of settings hold, and how many planted faults the tests find."""
    rows = rows_of("exactness_matrix", cells_title())
    cells = [row["hold"].split(" of ") for name, row in rows.items() if name.startswith("replicas: ")]
    hold, tried = (sum(int(each[place]) for each in cells) for place in (0, 1))
    off = rows["precision: float32"]["largest difference"]
    faults = saved("mutants").values()
    found = sum(bool(each["found by"]) for each in faults)
    return (
        f"In {_share(hold, tried)} tested combinations of devices, optimizers, clipping, batches, weights, precision,\n"
        "XLA, accumulation and shards, training\n"
        "[ends with the weights of one device](docs/benchmarks/exactness.md): in float32 they differ by at most\n"
        f"{off}. The tests find {_share(found, len(faults))} faults that are\n"
        "[planted](CONTRIBUTING.md#how-oracles-work) in the package to see whether they do.\n"
    )


def _share(part: int, whole: int) -> str:
    return f"all {whole}" if part == whole else f"{part} of {whole}"


def costs() -> str:
    """What the components cost, and beside what: the slower ones too."""
    accumulation = rows_of("accumulation", "Milliseconds a micro-batch of 64")
    gpu = saved("gpu")["NVIDIA H200"]["parts"]["fast"]["lines"]["accumulation with Adam: MLP, k=4"]
    on_gpu = gpu["values"]["milliseconds"]
    replicas = rows_of(
        "distribution", "A step on 2 replicas, MLP 784-512-512-10, batch of 128; gradients are added up on one"
    )
    workers = rows_of("distribution", "Two workers on a ring")
    examples = saved("per_example")["A step of fit, in plain steps"]
    clipped = [row["jit off"] for row in examples if row[""].strip() == "clipped update"]
    private = rows_of("privacy", "A step of 1024 examples in fit")
    theirs = [row for row in saved("privacy")["A step in other libraries"] if row["examples"] == 1024]
    opacus = [row["private, four physical batches, to plain"] for row in theirs if row[""].startswith("Opacus")]
    ours = [
        private[f"{model}, jit off"]["make_private, four physical batches, to plain"]
        for model in ("mlp", "cnn", "transformer")
    ]
    contrastive = rows_of("contrastive", "Milliseconds a step, jit off")
    recomputed = rows_of("recompute", "Milliseconds a step, jit off")
    memory = rows_of("recompute", "Peak memory")
    auto = 'recompute(model, "auto")'
    return table(
        ["", "compared with", "ratio"],
        [
            ["accumulation of 4, XLA", "Keras's own", accumulation["jit on, k=4"]["to built-in"]],
            ["accumulation of 4, without XLA", "Keras's own", accumulation["jit off, k=4"]["to built-in"]],
            ["accumulation of 4, XLA, one H200", "Keras's own", on_gpu["AccumulatingOptimizer"] / on_gpu["Keras"]],
            ["two replicas", "`MirroredStrategy`", without_range(replicas["Adam"]["ours to stock, at most 1"])],
            [
                "two workers",
                "half the step and the all-reduce, each alone",
                without_range(workers["the step to the sum of the two"]["ms"]),
            ],
            ["clipping per example: MLP, CNN, Transformer", "the plain step", _list(clipped)],
            ["`make_private`: MLP, CNN, Transformer", "the plain step", _list(ours)],
            ["Opacus: the same, in PyTorch", "its plain step", _list(opacus)],
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


def _list(values: Sequence[float]) -> str:
    return ", ".join(in_words(value) for value in values)


def exactness_of_distribution() -> str:
    """Every setting of the matrix."""
    rows = rows_of("exactness_matrix", "Largest difference of")
    return table(
        ["", "Keras", "`DistributedFit`"],
        [[name, *list(row.values())[1:]] for name, row in rows.items()],
    )


def exactness_of_accumulation() -> str:
    """Every setting of windows."""
    rows = rows_of("exactness", "Largest difference from")
    head = ["", "`gradient_accumulation_steps=4`", "`AccumulatingOptimizer`"]
    return table(head, [[name, *list(row.values())[1:]] for name, row in rows.items()])


def processor_times(name: str, what: str) -> str:
    """Milliseconds of processor time without and with XLA, each beside what it is compared to."""
    without, by_xla = (rows_of(name, f"Milliseconds a step, jit {jit}: {what}") for jit in ("off", "on"))
    *_, to = next(iter(without.values()))
    head = ["", "jit off", to.removesuffix(", CPU time"), "jit on", to.removesuffix(", CPU time")]
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
    """A difference, or what refuses."""
    if result is None:
        return ""
    return (
        result["error"].replace("|", "\\|")
        if "error" in result
        else f"{result['difference']:.0e}".replace("0e+00", "0")
    )


def backups(disk: str) -> str:
    """How long training waits for a backup."""
    rows = rows_of("backups", f"2 backups of a model of 200 MB with Adam, every 20 steps, {disk} disk")
    columns = ["seconds blocked by one", "% of training", "to synchronous"]
    return table(
        ["", *columns],
        [[name, *(f"{row[each]:.2g}" for each in columns)] for name, row in rows.items() if row[columns[0]]],
    )


def soak() -> str:
    """What trainings came to whose workers and machines were lost and came."""
    (rows,) = saved("soak").values()
    head = ["", "trainings", "disturbances", "worlds", "largest difference"]
    errors = [f"{row['error']:.0e}".replace("0e+00", "0") for row in rows]
    cells = zip(rows, errors, strict=True)
    return table(head, [[*(row[name] for name in ["", *head[1:4]]), error] for row, error in cells])


def worlds() -> str:
    """By form and sequence of worlds, the difference from one device, and the digest of deterministic training."""
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
    """By pair of releases, the seconds from an empty environment to the end of README's first script."""
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


# By page and by the name of a table there, what writes it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"trust": trust, "stock Keras": stock_errors, "costs": costs},
    "docs/index.md": {"stock Keras": stock_errors},
    "docs/benchmarks/exactness.md": {
        "accumulation": exactness_of_accumulation,
        "distribution": exactness_of_distribution,
        "cells": lambda: as_saved("exactness_matrix", cells_title()),
    },
    "docs/benchmarks/releases.md": {"releases": releases, "installation": installation},
    "docs/guides/elastic.md": {"soak": soak},
    "docs/guides/deterministic.md": {
        "worlds": worlds,
        "cost": functools.partial(as_saved, "deterministic", "Milliseconds a step"),
    },
    "docs/benchmarks/distribution.md": {
        "backups": functools.partial(backups, "fast"),
        "slow backups": functools.partial(backups, "slow"),
    },
    "docs/benchmarks/index.md": {
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
        "phases": functools.partial(processor_times, "custom_steps", "GAN"),
    },
}


def written(page: str, text: str) -> str:
    """A page's text with its tables as they are saved.

    Raises:
        KeyError: The page has marks of a table that is not in `TABLES`.
    """
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[page][found[2]]()}{found[3]}", text)


def main() -> None:
    for page in TABLES:
        path = ROOT / page
        path.write_text(written(page, path.read_text()))


if __name__ == "__main__":
    main()
