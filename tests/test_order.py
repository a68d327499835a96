"""The slowest modules are there, and go first."""

from pathlib import Path
from types import SimpleNamespace

from order import SLOW, slowest_first

TESTS = Path(__file__).parent


def test_the_slowest_are_there_and_go_first():
    assert [name for name in SLOW if not (TESTS / name).exists()] == []
    assert len(SLOW) == len(set(SLOW))
    names = ["accumulation/test_advice.py", SLOW[3], "inputs/test_data.py", SLOW[0], SLOW[3]]
    items = [SimpleNamespace(path=TESTS / name) for name in names]
    slowest_first(items, TESTS)
    assert [str(item.path.relative_to(TESTS)) for item in items] == [SLOW[0], SLOW[3], SLOW[3], names[0], names[2]]
