"""The checks of arguments: what they take, what they make of it, and what they say of anything else."""

import decimal
import fractions

import numpy as np
import pytest

import keras_paragrad.arguments as arguments

pytestmark = pytest.mark.fast

STRANGE = [["long\n" * 10**6], [[[[[object()]]]]], object, 1j, b"a", 10**6000, np.zeros((2, 2))]


@pytest.mark.parametrize(
    ("check", "values", "plain"),
    [
        (arguments.check_integer, [3, np.int8(3), np.uint64(3), np.array(3)], 3),
        (arguments.check_number, [0.5, np.float16(0.5), np.array(0.5), fractions.Fraction(1, 2)], 0.5),
        (arguments.check_number, [decimal.Decimal("0.5")], 0.5),
        (arguments.check_number, [2, np.int64(2)], 2),
        (arguments.check_flag, [True, np.True_, np.array(True)], True),
        (arguments.check_text, ["word", np.str_("word")], "word"),
    ],
)
def test_makes_plain_values_of_numpys(check, values, plain):
    for value in values:
        found = check("name", value)
        assert found == plain and type(found) is type(plain)


@pytest.mark.parametrize(
    ("check", "bad"),
    [
        (arguments.check_integer, [0, -1, True, np.True_, 1.0, "1", None, 2**63, np.array([1])]),
        (arguments.check_number, [True, "1", None, float("nan"), float("inf"), np.float32("inf"), np.array([1.0])]),
        (arguments.check_flag, [1, 0, None, "True"]),
        (lambda name, value: arguments.check_choice(name, value, ("a", None)), ["b", "", True, 0]),
        (arguments.check_text, ["", " ", None, 1]),
        (arguments.check_path, ["", "a\0", "gs://bucket/logs", "a" * 256, "a/" * 2100, "\ud800", None, 1]),
        (arguments.check_function, [None, 1, "sum"]),
        (lambda name, value: arguments.check_instance(name, value, str, "a word"), [1, None]),
        (
            lambda name, value: arguments.check_each(name, value, arguments.check_flag, "flags"),
            ["12", 5, iter([True]), range(2**62)],
        ),
    ],
)
def test_refuses_anything_else_on_one_line(check, bad):
    for value in [*bad, *STRANGE]:
        with pytest.raises(ValueError, match=r"^`name(\[0\])?` is [^\n]{1,200}, and must be ") as refused:
            check("name", value)
        assert len(str(refused.value)) < 500


def test_names_bounds_and_what_to_type():
    with pytest.raises(ValueError, match="^`rate` is 1, and must be a finite number of at least 0 and below 1. Write "):
        arguments.check_number("rate", 1, least=0, below=1, example=0.5)
    with pytest.raises(ValueError, match="an integer from 1 to 9, or None. Write n=4.$"):
        arguments.check_integer("n", 10, most=9, example=4, optional=True)
    with pytest.raises(ValueError, match=r"^`rates\[1\]` is nan"):
        arguments.check_each("rates", (1, float("nan")), arguments.check_number, "numbers")
    for check in (arguments.check_integer, arguments.check_number, arguments.check_text, arguments.check_path):
        assert check("n", None, optional=True) is None


def test_a_directory_may_be_missing_but_no_file(tmp_path):
    assert arguments.check_path("log_dir", str(tmp_path / "new"), directory=True) == tmp_path / "new"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="this is a file"):
        arguments.check_path("log_dir", tmp_path / "file", directory=True)
