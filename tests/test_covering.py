"""What `make test` takes of a test's combinations covers all values of its parameters."""

import itertools

import hypothesis.strategies as st
from covering import chosen
from hypothesis import given


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_all_values_occur_and_all_pairs(sizes, strength):
    rows = list(itertools.product(*(range(size) for size in sizes)))
    kept = chosen(rows, strength)
    for columns in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        assert {tuple(rows[index][each] for each in columns) for index in kept} == set(
            itertools.product(*(range(sizes[each]) for each in columns))
        )


def test_few_are_kept_and_each_value_in_its_turn():
    rows = list(itertools.product("abcdef", "xyz"))
    kept = [rows[index] for index in sorted(chosen(rows, 1))]
    assert [first for first, _ in kept] == list("abcdef")
    assert sorted(second for _, second in kept) == list("xxyyzz")
    assert len(chosen(list(itertools.product(range(3), repeat=4)), 2)) <= 15


def test_a_combination_that_is_left_out_from_the_first_is_not_asked_for():
    assert chosen([("a", "x"), ("b", "y")], 2) == {0, 1}
