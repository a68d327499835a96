"""The tiers of the tests: `make test-fast` traces nothing, `make test` takes minutes, `make test-all` the rest too."""

import functools
import json
import os
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# The seconds of each module, written by `make durations`.
RECORDED = TESTS / "durations.json"
# What `make test-fast` leaves out of the modules that are marked `fast`.
NOT_FAST = ("not_fast", "long", "own_process")

# And `long`, which doctests are selected by as well, in pyproject.toml.
MARKERS = (
    "fast: a module of `make test-fast`, as its tests trace no graph and take less than a second.",
    "not_fast: traces a graph or takes longer, in a module that is marked `fast`.",
)


def keep_part(items: list[pytest.Function], part: str) -> None:
    """Keeps the tests of one machine of several, in place: `2/3` is the second of three.

    Each module goes to the machine that has least to do so far, by recorded seconds, the slowest first.
    """
    number, _, machines = part.partition("/")
    recorded = json.loads(RECORDED.read_text())
    modules = sorted({_module(item.nodeid) for item in items}, key=lambda module: (-recorded.get(module, 0), module))
    seconds, of_module = [0.0] * int(machines), {}
    for module in modules:
        of_module[module] = seconds.index(min(seconds))
        # A module that is not recorded yet takes something too.
        seconds[of_module[module]] += recorded.get(module, 0) + 0.5
    items[:] = [item for item in items if of_module[_module(item.nodeid)] == int(number) - 1]


def slowest_first(items: list[pytest.Function]) -> None:
    """Sorts tests, in place, by their modules' recorded seconds: a slow one begun last leaves other workers idle."""
    recorded = json.loads(RECORDED.read_text())
    items.sort(key=lambda item: -recorded.get(_module(item.nodeid), 0))


class Recorder:
    """Writes the seconds that each module has taken, where the environment's DURATIONS says where to."""

    def __init__(self, path: Path):
        self.path = path
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a test's, with those of its fixtures."""
        self.seconds[_module(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the file."""
        rounded = {module: round(seconds, 1) for module, seconds in sorted(self.seconds.items())}
        self.path.write_text(json.dumps(rounded, indent=1) + "\n")


def register(config: pytest.Config) -> None:
    """Adds the markers, and the recorder if it is asked for, to the process that hands out the tests."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if (path := os.environ.get("DURATIONS")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)))


class Traced:
    """How many graphs a test traces."""

    def __init__(self) -> None:
        self._before = _graphs_made().total()

    def refusal(self, item: pytest.Item) -> str | None:
        """What is wrong with it, by the test's marks."""
        graphs = _graphs_made().total() - self._before
        if graphs and item.get_closest_marker("fast") and not any(map(item.get_closest_marker, NOT_FAST)):
            return f"is in a `fast` module and has made {graphs} graphs. Mark it @pytest.mark.not_fast."
        return None


@functools.cache
def _graphs_made() -> Counter[str]:
    """Counts the graphs that TensorFlow traces functions into, from the first call on."""
    from tensorflow.python.framework.func_graph import FuncGraph

    made: Counter[str] = Counter()
    initialize = FuncGraph.__init__

    @functools.wraps(initialize)
    def counted(graph, *args, **kwargs):
        made["graphs"] += 1
        initialize(graph, *args, **kwargs)

    FuncGraph.__init__ = counted
    return made


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")
