"""Keras's examples by class, and what each component does with them.

`census.json` names, for each example that trains, the miniature with its structure; `expectations.py` has what each
component does with that, which the tests hold.

    PYTHONPATH=tests python tests/foreign/keras_io/census.py          # prints the table and the two percentages
    PYTHONPATH=tests python tests/foreign/keras_io/census.py --write  # and writes them into the documentation
"""

import collections
import json
import sys
from pathlib import Path

from foreign.keras_io.expectations import CLASSES, WAYS, expected

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# The parts that are generated, of pages in which markers enclose them.
PAGES = {"README.md": ("percentages",), "docs/benchmarks/releases.md": ("table", "exceptions")}
# What the columns are called.
TITLES = {"recomputation": "`recompute`", "slices": "`microbatch`"}


def examples() -> dict[str, str]:
    """The miniature of each example."""
    return json.loads((HERE / "census.json").read_text())


def shares() -> tuple[float, float, int]:
    """The shares of examples that train exactly: cut in time, and on replicas and in shards; and their number."""
    names = list(examples().values())
    cut = sum(any(expected(name, way).exact for way in ("accumulation", "slices")) for name in names)
    spread = sum(all(expected(name, way).exact for way in ("replicas", "shards")) for name in names)
    return cut / len(names), spread / len(names), len(names)


def percentages() -> str:
    """The sentence of the README."""
    cut, spread, count = shares()
    return (
        f"Of the {count} [official Keras 3 examples that train](docs/benchmarks/releases.md#kerass-examples), "
        f"{cut:.0%} take the steps of whole batches by accumulation or in slices, and {spread:.0%} on replicas "
        "and in shards, with at most one argument of theirs changed."
    )


def table() -> str:
    """The rows of the documentation: for each class, how many of its examples each component trains exactly."""
    by_class = collections.defaultdict(list)
    for name in examples().values():
        by_class[CLASSES[name]].append(name)
    titles = [TITLES.get(way, way) for way in WAYS]
    rows = [["class", "examples", *titles], ["---", *["---:"] * (len(titles) + 1)]]
    for kind, names in sorted(by_class.items(), key=lambda item: -len(item[1])):
        exact = [sum(expected(name, way).exact for name in names) for way in WAYS]
        rows.append([kind, str(len(names)), *map(str, exact)])
    every = list(examples().values())
    exact = [sum(expected(name, way).exact for name in every) for way in WAYS]
    rows.append(["**all**", *(f"**{count}**" for count in (len(every), *exact))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def exceptions() -> str:
    """The rows of the documentation for what isn't exact as it is."""
    by_name = collections.defaultdict(list)
    for example, name in examples().items():
        by_name[name].append(f"`{example}`")
    rows = [["examples", *(TITLES.get(way, way) for way in WAYS)], ["---"] * (len(WAYS) + 1)]
    for name, titles in sorted(by_name.items(), key=lambda item: (CLASSES[item[0]], item[1])):
        outcomes = [expected(name, way).word for way in WAYS]
        if set(outcomes) != {"exact"}:
            rows.append([", ".join(titles), *outcomes])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


GENERATED = {"percentages": percentages, "table": table, "exceptions": exceptions}


def page(path: str) -> str:
    """A page with its generated parts anew."""
    text = (ROOT / path).read_text()
    for name in PAGES[path]:
        before, mark, rest = text.partition(f"<!-- census {name} -->\n")
        _, end, after = rest.partition(f"<!-- /census {name} -->")
        text = f"{before}{mark}{GENERATED[name]()}\n{end}{after}"
    return text


if __name__ == "__main__":
    print(table(), percentages(), sep="\n\n")
    if "--write" in sys.argv:
        for path in PAGES:
            (ROOT / path).write_text(page(path))
