"""Where things are drawn: axes, thinned series, bars and lines; and how numbers are written."""

import dataclasses
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from runner.covering import examples
from sample_models.log_directories import PIPELINE, step

from keras_paragrad.profiling.report import formatting
from keras_paragrad.profiling.report.formatting import axis_for, select_points, steps_axis
from keras_paragrad.profiling.report.lines import line_chart
from keras_paragrad.profiling.report.runs import Series
from keras_paragrad.profiling.report.step_chart import MOST_BARS, figures_of, shares_bar, step_chart
from keras_paragrad.profiling.report.window_view import stages_chart
from keras_paragrad.profiling.summary import PARTS

pytestmark = pytest.mark.fast

cases = examples(60, of=200)
anything = st.floats(allow_nan=True, allow_infinity=True)
numbers = st.floats(-1e12, 1e12, allow_subnormal=False).map(lambda value: 0.0 if abs(value) < 1e-12 else value)


@cases
@hypothesis.given(st.lists(anything, min_size=1, max_size=300), st.integers(5, 60))
# A peak within a span.
@hypothesis.example([0.0] * 45 + [1.0] + [0.0] * 100, 12)
def test_thinning_keeps_the_extremes(drawn, most):
    values = np.array(drawn)
    found = select_points(values, most)
    assert len(found) <= most
    assert (np.diff(found) > 0).all()
    assert found[0] == 0
    assert found[-1] == len(values) - 1
    finite = values[np.isfinite(values)]
    if len(finite):
        assert {finite.min(), finite.max()} <= set(values[found])
    assert np.isfinite(values).all() == np.isfinite(values[found]).all()


@cases
@hypothesis.given(st.lists(numbers, max_size=20), st.booleans(), st.booleans())
def test_axis_holds_its_values(values, may_be_logarithmic, binary):
    axis = axis_for(values, may_be_logarithmic=may_be_logarithmic, binary=binary)
    places = [axis.position(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    if not axis.logarithmic:
        rounding = 1e-8 * (axis.high - axis.low)
        assert axis.low - rounding <= min([0.0, *values])
        assert axis.high + rounding >= max([0.0, *values])
    marks = [place for place, _ in axis.ticks]
    assert 2 <= len(marks) <= 8
    assert marks == sorted(set(marks))


@cases
@hypothesis.given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_steps_are_whole(first, length):
    axis = steps_axis(first, first + length, formatting.count)
    assert all(mark == int(mark) and axis.low <= mark <= axis.high for mark in axis.marks)
    assert 1 <= len(axis.marks) <= 6


def test_bytes_have_marks_of_whole_units():
    axis = axis_for([1.3 * 2**30], formatting.size, binary=True)
    assert [name for _, name in axis.ticks] == ["0", "512 MiB", "1 GiB", "1.5 GiB"]


@pytest.mark.parametrize(
    ("written", "value", "expected"),
    [
        pytest.param(formatting.milliseconds, 0.0, "0", id="no time"),
        pytest.param(formatting.milliseconds, 0.0004, "0.4 µs", id="short"),
        pytest.param(formatting.milliseconds, 61000.0, "61 s", id="long"),
        pytest.param(formatting.milliseconds, None, "n/a", id="unknown time"),
        pytest.param(formatting.size, 3 * 2**30, "3 GiB", id="size"),
        pytest.param(formatting.size, 1023.0, "1,023 B", id="bytes"),
        pytest.param(formatting.size, None, "n/a", id="unknown size"),
        pytest.param(formatting.share, 0.573, "57%", id="share"),
        pytest.param(formatting.share, 0.0123, "1.2%", id="small share"),
        pytest.param(formatting.share, math.nan, "n/a", id="unknown share"),
        pytest.param(formatting.number, 999.6, "1,000", id="rounded to four digits"),
        pytest.param(formatting.number, -math.inf, "−∞", id="infinite"),
        pytest.param(formatting.operations, 2.5e9, "2.5 GFLOP", id="operations"),
    ],
)
def test_numbers_in_words(written, value, expected):
    assert written(value) == expected


@pytest.mark.parametrize("count", [1, 20, 500])
def test_bars_add_up(count):
    steps = [step(number, 1 + number % 5) for number in range(count)]
    figures = figures_of(steps)
    chart = step_chart(steps, figures)
    assert min(count, MOST_BARS * 0.9) <= len(chart.bars) <= MOST_BARS
    assert bool(chart.note) == (count > MOST_BARS)
    assert chart.labels[0] == (pytest.approx(chart.bars[0].width / 2), chart.bars[0].cells[0])
    assert 1 <= len(chart.labels) <= 5
    by_step = {one.step: one for one in steps}
    for bar in chart.bars:
        height = sum(segment.length for segment in bar.segments)
        assert height == pytest.approx(chart.y_axis.position(by_step[bar.step].duration), abs=0.1)
        assert [segment.part for segment in bar.segments] == list(PARTS)
    assert sum(segment.length for segment in shares_bar(figures)) == pytest.approx(100, abs=0.1)


def test_a_line_has_gaps_where_values_are_no_numbers():
    series = Series("gradient_norm", "dense", "", np.arange(6.0), np.array([1.0, 2.0, np.nan, 4.0, np.inf, 5.0]))
    (line,) = line_chart("Norm", [series]).lines
    assert line.pieces == ("0,833 2000,667",)
    assert [x for x, _ in line.dots] == [60.0, 100.0]
    assert line.gaps == (40.0, 80.0)
    assert (line.smallest, line.largest, line.last) == ("1 (update 0)", "5 (update 5)", "5")
    assert (line.steps, line.values) == ("0 1 1 1 1 1", "1|2|NaN|4|∞|5")


def test_the_script_is_given_the_values_drawn():
    steps = np.arange(1000.0) * 3 + 7
    values = np.sin(steps)
    (line,) = line_chart("Norm", [Series("gradient_norm", "", "", steps, values)]).lines
    drawn = np.cumsum([int(gap) for gap in line.steps.split()])
    assert (drawn[0], drawn[-1]) == (7, 3004)
    assert line.values.split("|") == [formatting.number(values[(step - 7) // 3]) for step in drawn]


def test_a_chart_of_no_number_is_a_chart():
    series = Series("gradient_norm", "", "", np.arange(3.0), np.full(3, np.nan))
    chart = line_chart("Norm", [series])
    assert chart.lines[0].gaps == (0.0, 50.0, 100.0)
    assert chart.lines[0].last == "not finite"
    assert "3 values are NaN or infinite" in chart.notes[0]


def test_the_table_has_the_values_of_the_steps():
    steps = np.arange(0.0, 1000.0, 10)
    chart = line_chart("Norm", [Series("", "a", "", steps, steps * 2), Series("", "b", "", steps[:1], np.array([7.0]))])
    assert chart.heads == ("update", "a", "b")
    assert chart.rows[0] == ("0", "0", "7")
    assert chart.rows[-1] == ("990", "1,980", "·")


def test_stages_are_lanes():
    chart = stages_chart(PIPELINE)
    assert [lane.name for lane in chart.lanes] == ["stage 0a", "stage 0b", "stage 1a", "stage 1b"]
    assert [row[1:] for row in chart.rows] == [("2 ms", "4 ms")] * 4
    first, second, third, fourth = chart.lanes[0].boxes
    assert [box.number for box in chart.lanes[0].boxes] == ["0", "2", "0", "2"]
    assert (first.kind, fourth.kind) == ("forward", "backward")
    assert math.isclose(first.left + first.width, second.left)
    assert third.left + third.width == fourth.left == pytest.approx(100 * 7 / chart.x_axis.high)
    assert "wait 40%" in chart.note and "wait 33%" in chart.note
    # Of micro-batches that are computed at once, one has its number drawn over.
    over = dataclasses.replace(PIPELINE.work[0], micro_batch=2, begins=0.4)
    lane, *_ = stages_chart(dataclasses.replace(PIPELINE, work=(PIPELINE.work[0], over))).lanes
    assert [box.number for box in lane.boxes] == ["", "2"]
