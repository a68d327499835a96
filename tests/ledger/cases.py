"""The cases of the ledger: of the census, the exactness matrix and the fuzzer, and what becomes of each."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

# What makes models as it is imported, the miniatures, is imported by processes that have their devices.
from exactness_cell import completed, environments, holds, train, worst
from exactness_matrix import cells_covering, single_cells
from fuzz.cases import drawn
from fuzz.outcomes import environment, first_line, hearing, is_refusal, outside, set_up
from fuzz.rules import applying
from runner.own_process import call

SEEDS = 200
# What the package's warnings of other steps than one device's say.
OTHER_STEPS = re.compile("with the statistics of each|weights (all )?micro-batches equally")
# What differs from run to run in what is said: paths, and numbers in messages and names.
PATH, NUMBER = re.compile(r"(?<![\w.])/[\w./+-]+"), re.compile(r"(?<![A-Za-z0-9])\d+(\.\d+)?(e[+-]?\d+)?(?![A-Za-z])")
LONGEST = 160
FUZZED = {"same": "exact", "refused": "refused", "DIFFERS": "wrong", "NO END": "timeout"}


class Found(NamedTuple):
    """What became of a case: `exact`, `warned`, `refused`, `wrong`, `error` or `timeout`, and how."""

    kind: str
    how: str = ""

    @property
    def recorded(self) -> str:
        """In a line that is the same in each run."""
        how = NUMBER.sub("#", PATH.sub("PATH", " ".join(self.how.split())))
        how = how if len(how) <= LONGEST else how[:LONGEST].rpartition(" ")[0] + " ..."
        return f"{self.kind}: {how}" if how else self.kind


class RefusedError(Exception):
    """What the package has refused in a process of its own."""


def _called(function: Callable[[Any], Any], argument: Any, places: list[Any], seconds: float) -> list[Any] | Found:
    """What a function returns in processes of their own, or what becomes of a case that ends otherwise."""
    try:
        return call(_refusing, (function, argument), [{**place, **environment()} for place in places], seconds)
    except RuntimeError as error:
        kind, _, how = str(error).partition(": ")
        if "not done in time" in kind:
            return Found("timeout")
        return Found("refused", how) if kind == RefusedError.__name__ else Found("error", str(error))


def _refusing(task: tuple[Callable[[Any], Any], Any]) -> Any:
    function, argument = task
    try:
        return function(argument)
    except Exception as error:
        if is_refusal(error):
            raise RefusedError(first_line(error)) from error
        raise


def _train_miniature(case: tuple[str, str, bool]) -> tuple[Any, list[str]]:
    set_up()
    from foreign.keras_io import ways
    from foreign.keras_io.expectations import MINIATURES, expected

    name, way, alone = case
    outcome = expected(name, way)
    changed = {"changed": outcome.changed} if outcome.changed else {}
    train = ways.plain if alone else functools.partial(ways.WAYS[way], **outcome.options)
    with hearing() as said:
        found = train(MINIATURES[name], **changed)
    return found, said


@functools.cache
def _plain(name: str, way: str, seconds: float) -> list[Any] | Found:
    return _called(_train_miniature, (name, way, True), [{}], seconds)


def _of_miniature(name: str, way: str, seconds: float) -> Found:
    from foreign.keras_io.expectations import TOLERANCE, expected
    from foreign.keras_io.ways import errors

    result, outcome = _called(_train_miniature, (name, way, False), [{}], seconds), expected(name, way)
    if isinstance(result, Found):
        return result
    found, said = result[0]
    if told := [each for each in said if OTHER_STEPS.search(each)]:
        return Found("warned", told[0])
    # Ways that change nothing in the model have one reference.
    wanted = _plain(name, way if outcome.changed else "", seconds)
    if isinstance(wanted, Found):
        return Found("error", f"Keras alone: {wanted.kind}, {wanted.how}")
    if missing := wanted[0][0].history.keys() - found.history.keys():
        return Found("wrong", f"fit doesn't show {', '.join(sorted(missing))}")
    weights, shown = errors(found, wanted[0][0])
    # What isn't a number is no smaller.
    if not weights <= TOLERANCE:
        return Found("wrong", f"weights by {weights:.1e}")
    if not shown <= TOLERANCE:
        return Found("wrong" if outcome.logs else "exact", f"what fit shows is off by {shown:.1e}")
    return Found("exact", outcome.word.replace("exact", "").replace("`", ""))


def _of_cell(cell: dict[str, Any], seconds: float) -> Found:
    result = _called(train, {**cell, "way": "ours"}, environments(cell), seconds)
    if isinstance(result, Found):
        return result
    off = worst(result)
    return Found("exact") if holds(cell, off) else Found("wrong", f"weights by {off['difference']:.1e}")


def _of_seed(number: int, seconds: float) -> Found:
    found = outside(str(number), seconds)
    if found["kind"] == "by design":
        warned = any(rule.warned for rule in applying(drawn(number)))
        return Found("warned" if warned else "exact", found["about"])
    kind = FUZZED.get(found["kind"], "error")
    return Found(kind, {"timeout": "", "error": f"{found['kind']}, {found['about']}"}.get(kind, found["about"]))


def every() -> dict[str, Callable[[float], Found]]:
    """What measures each case in so many seconds at most, by the case's name."""
    from foreign.keras_io.expectations import MINIATURES, WAYS

    census = {f"census/{name}/{way}": (_of_miniature, name, way) for name in MINIATURES for way in WAYS}
    cells = [completed(cell) for cell in (*single_cells(), *cells_covering(2))]
    named = {f"matrix/{'-'.join(map(str, cell.values())).replace(' ', '_')}": (_of_cell, cell) for cell in cells}
    seeds = {f"fuzz/{number}": (_of_seed, number) for number in range(SEEDS)}
    return {name: functools.partial(*measured) for name, measured in {**census, **named, **seeds}.items()}
