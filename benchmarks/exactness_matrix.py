"""The exactness matrix: `DistributedFit` and Keras alone beside one device, in a process for each cell.

A cell has one setting of each axis. `python benchmarks/exactness_matrix.py` runs one setting at a time, beside Keras
alone, and then a sample in which all pairs of settings meet; with `--strength 3` all triples, with `--whole` all cells.
It prints the table of the README and saves it with the cells in `results`. With `--again`, what held the last time is
taken from there, and the rest is run.
"""

import argparse
import itertools
import json
import random
import sys

from exactness_cell import AXES, completed, holds, refused, run
from harness import RESULTS, report

CELLS = RESULTS / "exactness_cells.json"


def cells_covering(strength, seed=0):
    """Chooses few cells in which each combination of settings of `strength` axes occurs; greedily, from a seed."""
    generator = random.Random(seed)
    groups = list(itertools.combinations(AXES, strength))
    missing = {(group, values) for group in groups for values in itertools.product(*(AXES[name] for name in group))}
    cells = []
    while missing:
        group, values = generator.choice(sorted(missing, key=repr))
        wanted = dict(zip(group, values, strict=True))
        drawn = [{name: wanted.get(name, generator.choice(AXES[name])) for name in AXES} for _ in range(40)]
        drawn = [cell for cell in drawn if not refused(cell)]
        if not drawn:
            # No cell with this combination is accepted.
            missing.remove((group, values))
            continue
        best = max(drawn, key=lambda cell: len(_met(cell, groups) & missing))
        missing -= _met(best, groups)
        cells.append(best)
    return cells


def _met(cell, groups):
    """The combinations that a cell has: a setting of each axis in a group."""
    return {(group, tuple(cell[name] for name in group)) for group in groups}


def every_cell():
    cells = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return [cell for cell in cells if not refused(cell)]


def single_cells():
    """The first setting of every axis, and each other setting by itself."""
    first = {name: values[0] for name, values in AXES.items()}
    return [first, *({**first, name: value} for name, values in AXES.items() for value in values[1:])]


def held_before():
    """What held the last time, by the cell as JSON and the names of the result's fields, which say who ran it."""
    kept = json.loads(CELLS.read_text()) if CELLS.exists() else []
    kept = [{**each, "cell": completed(each["cell"])} for each in kept]
    return {(json.dumps(each["cell"]), *each): each for each in kept if holds(each["cell"], each["ours"])}


def run_all(cells, ways, known):
    """Runs cells, unless their results are `known`, in each way: `"ours"`, or Keras alone as `"stock"`."""
    results = []
    for number, cell in enumerate(cells, 1):
        before = known.get((json.dumps(cell), "cell", *ways))
        results.append(before or {"cell": cell, **{way: run(cell, way) for way in ways}})
        held = "holds" if holds(cell, results[-1]["ours"]) else "DOES NOT HOLD"
        print(f"{number}/{len(cells)} {held}: {json.dumps(results[-1])}", file=sys.stderr, flush=True)
    return results


def in_words(result):
    """The difference, or the name of the error."""
    if "error" in result:
        return result["error"].partition(":")[0].rpartition(".")[2]
    return f"{result['difference']:.0e}"


def what_differs(cell):
    """In words, the settings in which a cell differs from the first one."""
    return (
        ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in cell.items() if value != AXES[name][0])
        or "two replicas, SGD, even batches"
    )


def report_singles(known):
    results = run_all(single_cells(), ("ours", "stock"), known)
    rows = [[what_differs(each["cell"]), in_words(each["stock"]), in_words(each["ours"])] for each in results]
    title = "Largest difference of a weight from one device on whole batches"
    report("exactness_matrix", title, ["", "Keras", "DistributedFit"], rows)
    return results


def report_sample(cells, known):
    """Reports for each setting how many of its cells hold, and the largest difference of those in float32."""
    results = run_all(cells, ("ours",), known)
    rows = []
    for name, values in AXES.items():
        for value in values:
            having = [each for each in results if each["cell"][name] == value]
            plain = [each for each in having if name == "precision" or each["cell"]["precision"] == "float32"]
            worst = max(each["ours"].get("difference", float("inf")) for each in plain)
            held = sum(holds(each["cell"], each["ours"]) for each in having)
            rows.append([f"{name.replace('_', ' ')}: {value}", f"{held} of {len(having)}", f"{worst:.0e}"])
    title = f"{len(results)} cells: how many hold, and the largest difference of a weight in float32"
    report("exactness_matrix", title, ["", "hold", "largest difference"], rows)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strength", type=int, default=2, help="how many settings meet in all combinations")
    parser.add_argument("--whole", action="store_true", help=f"all {len(every_cell())} cells")
    parser.add_argument("--again", action="store_true", help="leave out what held the last time")
    arguments = parser.parse_args()
    known = held_before() if arguments.again else {}
    results = report_singles(known)
    results += report_sample(every_cell() if arguments.whole else cells_covering(arguments.strength), known)
    CELLS.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(not all(holds(each["cell"], each["ours"]) for each in results))


if __name__ == "__main__":
    main()
