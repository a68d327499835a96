"""The tiers of the tests: `make test-fast` traces nothing, `make test` takes minutes, `make test-all` the rest too."""

import functools
import json
import os
import resource
import time
from collections import Counter
from pathlib import Path

import pytest
from runner import own_process

TESTS = Path(__file__).parents[1]
# The seconds of each module, written by `make durations`.
RECORDED = TESTS / "durations.json"
# The processor time of a test that states no other.
SECONDS = 5
# What `slowness` measures on the machine that the seconds are meant for.
REFERENCE = 0.03
# What `make test-fast` leaves out of the modules that are marked `fast`.
NOT_FAST = ("not_fast", "slow", "long", "own_process")

# And `long`, which doctests are selected by as well, in pyproject.toml.
MARKERS = (
    "fast: a module of `make test-fast`, as its tests trace no graph and take less than a second.",
    "not_fast: traces a graph or takes longer, in a module that is marked `fast`.",
    "slow(seconds): part of `make test`, with more than 5 seconds of processor time, of which it takes no more than so "
    "many.",
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


class Spent:
    """What a test takes: processor time, of this process and of those it starts, and graphs."""

    def __init__(self) -> None:
        self._before = _seconds(), _graphs_made().total()

    def refusal(self, item: pytest.Item) -> str | None:
        """What is wrong with it, by the test's marks."""
        seconds, graphs = _seconds() - self._before[0], _graphs_made().total() - self._before[1]
        fast = item.get_closest_marker("fast") and not any(map(item.get_closest_marker, NOT_FAST))
        if fast and graphs:
            return f"is in a `fast` module and has made {graphs} graphs. Mark it @pytest.mark.not_fast."
        # With more cases drawn, or XLA's optimizations, they take as long as they need.
        if any(map(item.get_closest_marker, ("long", "own_process"))) or "CASES" in os.environ:
            return None
        slow = item.get_closest_marker("slow")
        limit = slow.args[0] if slow else SECONDS
        # Other processes slow a machine down for minutes, so it is measured at this moment. What is left of noise stays
        # below twice.
        if seconds <= limit or seconds <= 2 * limit * slowness():
            return None
        return (
            f"has taken {seconds:.1f} s of processor time, and may take {limit}. Make its case smaller, or mark it "
            f"@pytest.mark.slow({round(2 * seconds)}), or @pytest.mark.long for `make test-all`."
        )


def _seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + own_process.processor_seconds()


def slowness() -> float:
    """How many times as long this machine takes as the one that the seconds are meant for, or 1 if it is faster."""
    before = time.process_time()
    for _ in range(5):
        sum(range(2_000_000))
    return max(1.0, (time.process_time() - before) / (5 * REFERENCE))


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
