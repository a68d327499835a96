"""What runs wrote down is read again, whatever state it is in."""

import math

import pytest
from sample_models.log_directories import RETRACES, TELEMETRY, write_rows

from keras_paragrad.profiling.report.runs import MOST_RETRACES, read_retraces, read_series

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param("2,0,dense,ker", id="cut off"),
        pytest.param("2,0,dense,kernel,gradient_norm,", id="without its value"),
        pytest.param("2,0,dense,kernel,gradient_norm,abc\n", id="not a number"),
        pytest.param("nan,0,dense,kernel,gradient_norm,1\n", id="of no step"),
        pytest.param("\0\0\0\0\n", id="zeros"),
        pytest.param("\n\n", id="empty"),
    ],
)
def test_rows_that_are_not_whole_are_passed_over(tmp_path, rest):
    whole = "step,epoch,layer,variable,quantity,value\n1,0,dense,kernel,gradient_norm,2.5\n"
    (tmp_path / "telemetry.csv").write_text(whole + rest)
    (series,) = read_series(tmp_path, "telemetry")
    assert (series.quantity, series.name) == ("gradient_norm", "dense/kernel")
    assert series.steps.tolist() == [1]
    assert series.values.tolist() == [2.5]


def test_a_run_that_went_on_counts_once(tmp_path):
    rows = [
        (step, 0, "", "", "loss_scale", value) for step, value in [(1, 1), (2, 2), (3, 3), (2, 20), (3, 30), (4, 40)]
    ]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows)
    (series,) = read_series(tmp_path, "telemetry")
    assert series.steps.tolist() == [1, 2, 3, 4]
    assert series.values.tolist() == [1, 20, 30, 40]


def test_values_that_are_no_numbers_stay(tmp_path):
    rows = [(0, 0, "", "", "gradient_norm", "nan"), (1, 0, "", "", "gradient_norm", "inf")]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows)
    (series,) = read_series(tmp_path, "telemetry")
    assert math.isnan(series.values[0])
    assert math.isinf(series.values[1])
    assert len(series.finite) == 0


def test_no_file_is_no_series(tmp_path):
    assert read_series(tmp_path, "telemetry") == ()
    assert read_retraces(tmp_path) == ([], 0)


def test_the_last_retraces_are_kept(tmp_path):
    write_rows(tmp_path / "retraces.csv", RETRACES, [(index, "step", f"float32[{index}]") for index in range(60)])
    retraces, count = read_retraces(tmp_path)
    assert count == 60
    assert len(retraces) == MOST_RETRACES
    assert retraces[-1][-1] == "float32[59]"
