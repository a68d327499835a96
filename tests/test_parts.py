"""A component needs the private names of its own parts, looks for them when it is made, and for no others."""

import functools

import pytest
import taken_away
from every_component import CASES

from keras_paragrad.compat import check
from keras_paragrad.compat.check import forget, look_for
from keras_paragrad.compat.names import HOOKS, NAMES

# What a case may differ by from the oracle.
TOLERANCE = 1e-6


def make(name):
    """Makes a case's component, or where that is a function calls it."""
    made = CASES[name].make()
    if CASES[name].called:
        CASES[name].run(made)
    return made


@functools.cache
def parts_of(name):
    """The parts whose names a component looks for when it is made."""
    forget()
    make(name)
    return frozenset(check._FOUND)


@pytest.mark.parametrize("name", CASES)
def test_a_component_works_without_the_names_of_other_parts(name):
    parts = parts_of(name)
    forget()
    made = CASES[name].make()
    with taken_away.without(NAMES.keys() - parts):
        assert CASES[name].run(made) < TOLERANCE
    assert parts == check._FOUND, "it has looked for more after it was made"


def _take(monkeypatch, gone):
    def problem(hook):
        return check._missing(hook) if hook is gone else None

    monkeypatch.setattr(check, "_PROBLEMS", dict.fromkeys(check._PROBLEMS, problem))


@pytest.mark.parametrize("name", CASES)
def test_without_a_name_of_its_parts_it_refuses_and_without_others_it_is_made(monkeypatch, name):
    parts = parts_of(name)
    for part, hooks in NAMES.items():
        gone = next(hook for hook in hooks if not hook.optional)
        _take(monkeypatch, gone)
        forget()
        if part in parts:
            with pytest.raises(ImportError, match=f"cannot work with .*:{gone.path} is missing .*Known to work: keras"):
                make(name)
        elif not CASES[name].called:
            make(name)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}:{hook.path}")
def test_its_part_looks_for_each_name(monkeypatch, hook):
    _take(monkeypatch, hook)
    for part, hooks in NAMES.items():
        forget()
        if hook not in hooks or hook.optional:
            look_for(part)
            continue
        with pytest.raises(ImportError, match=f"{hook.module}:{hook.path} is missing"):
            look_for(part)


def test_every_part_is_used_by_a_component():
    # A process of one worker makes no strategy of several.
    assert frozenset().union(*map(parts_of, CASES)) == NAMES.keys() - {"workers"}


def test_what_is_taken_away_is_missed():
    made = make("microbatch")
    with taken_away.without({"models"}), pytest.raises((AttributeError, ImportError), match="_taken_away|is missing"):
        CASES["microbatch"].run(made)
