"""When windows are."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from keras_paragrad.profiling.schedule import MOST_ACTIVE, ProfileSchedule

pytestmark = pytest.mark.fast

COUNTS = st.integers(0, 30)


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 30), st.integers(1, 4))
def test_windows_follow_one_another(skip_first, wait, warmup, active, repeat):
    schedule = ProfileSchedule(skip_first, wait, warmup, active, repeat)
    windows = [schedule.window(index) for index in range(repeat)]
    # As one counts on fingers: the name of each batch's part.
    named = ["skip"] * skip_first + (["wait"] * wait + ["warmup"] * warmup + ["active"] * active) * repeat
    traced = [batch for window in windows for batch in range(window.begin, window.end)]
    warming = [batch for window in windows for batch in range(window.warmup, window.begin)]
    assert traced == [batch for batch, name in enumerate(named) if name == "active"]
    assert warming == [batch for batch, name in enumerate(named) if name == "warmup"]
    assert schedule.window(repeat) is None


def test_without_an_end_there_is_always_one_more():
    assert ProfileSchedule(repeat=None).window(1000).end == 10 + 1001 * 12


@pytest.mark.parametrize(
    ("name", "value"),
    [("skip_first", -1), ("wait", 0.5), ("warmup", "1"), ("active", 0), ("repeat", 0), ("repeat", True)],
    ids=["negative", "fraction", "text", "nothing-active", "no-windows", "bool"],
)
def test_what_is_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}.*integer of at least"):
        ProfileSchedule(**{name: value})


def test_a_window_that_would_not_stay_small_is_refused():
    with pytest.raises(ValueError, match="at most 200 batches.*repeat=11"):
        ProfileSchedule(active=MOST_ACTIVE + 1)
