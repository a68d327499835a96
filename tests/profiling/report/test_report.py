"""The report as a file: what it says, that it needs nothing else, how large it gets, and what it can't show."""

import base64
import dataclasses
import hashlib
import json
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from runner.covering import examples
from sample_models.log_directories import (
    TELEMETRY,
    THROUGHPUT,
    make_run,
    summary,
    telemetry_rows,
    throughput_rows,
    write_rows,
    write_window,
)

import keras_paragrad
from keras_paragrad.cli.main import main
from keras_paragrad.profiling.report import write_report
from keras_paragrad.profiling.report.lines import line_chart, select_points
from keras_paragrad.profiling.report.runs import Series
from keras_paragrad.profiling.summary import LayerTime, OperationTime, ProfileSummary, StepTime

pytestmark = pytest.mark.fast

cases = examples(60, of=200)
anything = st.floats(allow_nan=True, allow_infinity=True)


def data_of(path):
    """The data in a report, which its script draws."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script id="data" type="application/json">(.*)</script>\n', text)[1])


def blocks_of(page, kind):
    """All blocks of a kind, in order."""
    inside = page.get("blocks", ()) if isinstance(page, dict) else page
    found = [block for section in page.get("sections", ()) for block in blocks_of(section, kind)]
    for block in inside:
        found += ([block] if block["type"] == kind else []) + blocks_of(block, kind)
    return found


def words_of(path):
    return json.dumps(data_of(path), ensure_ascii=False)


def titles(path):
    return [chart["title"] for chart in blocks_of(data_of(path), "lines")]


def test_it_has_what_was_measured(tmp_path):
    path = write_report(make_run(tmp_path))
    page, words = data_of(path), words_of(path)
    assert page["headlines"] == [
        ["Step time, median", 10, "ms"],
        ["Step time, 95th percentile", 30, "ms"],
        ["Waiting for input", 0.5, "share"],
        ["Computing", 0.25, "share"],
        ["Examples per second, median", 12003, "number"],
        ["Updates per second, median", 401, "number"],
        ["Time to the first step", 1500, "ms"],
        ["FLOPs per step", 3e9, "FLOP"],
        ["Retraces", 1, "count"],
    ]
    (steps,) = blocks_of(page, "steps")
    assert steps["steps"][0] == [100, 25, 10, 5, 0.75, 0.25, 2.5, 1, 0.5]
    assert sum(steps["shares"].values()) == pytest.approx(1)
    (layers,) = blocks_of(page, "lanes")
    assert layers["rows"][0] == ["block_with_a_long_name/multi_head_attention_1", 1.5, 0.5, 0.8, 0.2, None, 30 / 57.75]
    assert [lane["apart"] for lane in layers["lanes"][:4]] == [False, False, True, False]
    tables = {table["caption"]: table["rows"] for table in blocks_of(page, "table")}
    assert tables["Time by kind of operation"][0] == ["Kind0", 1.5, 0.1, 40]
    assert tables["Time by kind of operation"][-1] == ["3 other kinds", pytest.approx(2.7), pytest.approx(0.12), 120]
    assert tables["Operations that took longest"][0] == ["digits/dense/MatMul", 1.5, 0.6, 40, "MatMul", "dense"]
    assert tables["Peak memory"] == [["host", 3 * 2**30]]
    lines = {chart["title"]: chart for chart in blocks_of(page, "lines")}
    memory = lines["Memory in use in the window"]["lines"][0]
    assert memory["name"] == "allocator GPU_0_bfc"
    assert (memory["largest"], memory["median"]) == ([8 * 2**20, 100.875], 4.5 * 2**20)
    norms = blocks_of(page, "layers")[0]["chart"]["lines"][2]
    assert norms["values"][7] == "∞" and norms["last"] == 0.001
    assert [mark["seconds"] for mark in lines["Step time over the run"]["marks"]] == [2, 8]
    for expected in (
        "Profile of digits",
        "prefetch(tf.data.AUTOTUNE).",
        '["Collectives take ", [2, "ms"], " per batch. ", [0.25, "share"], " of this time is hidden',
        '["Stages wait ", [0.4, "share"], " of the time',
        "<b>loss</b> & more",
        "The chart shows 15 of 20 layers; the table lists all.",
        "Layer names are those of the graph.",
        '["63", "one_step_on_data", "float32[17, 784]"]',
        "AccumulatingOptimizer(Adam)",
        "1,234,567",
        "2026-01-02 03:04:05 UTC",
        "1 values are NaN or infinite",
    ):
        assert expected in words, expected


def test_it_needs_nothing_else(tmp_path):
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    assert not re.search(r"<(link|img|iframe|object)|\b(src|href)=|@import|url\((?!#)", text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    _, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


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


def test_a_line_has_the_values_of_its_steps():
    steps = np.arange(1000.0) * 3 + 7
    (line,) = line_chart("Norm", "number", [Series("gradient_norm", "", "", steps, np.sin(steps))])["lines"]
    assert (line["steps"][0], line["steps"][-1]) == (7, 3004)
    assert line["values"] == pytest.approx(np.sin(line["steps"]).tolist(), rel=1e-5)


@pytest.mark.not_fast
def test_its_size_is_bounded_and_its_extremes_are_kept(tmp_path):
    operations = [OperationTime("op" * 500, "Kind", "layer", 1, 1.0, 0.001)] * 100
    for window in range(60):
        # Of the newest, each step is looked at.
        made = summary(1000 if window >= 50 else 100, operations=operations)
        layers = tuple(LayerTime(f"{'block/' * 20}dense_{number}", 3.0, 2.0, 1.0) for number in range(200))
        made = dataclasses.replace(made, layers=layers)
        write_window(tmp_path, made, f"plugins/profile/2026_01_01_00_00_{window:02}")
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, telemetry_rows(450, 120))
    write_rows(tmp_path / "throughput.csv", THROUGHPUT, throughput_rows(3000))
    path = write_report(tmp_path)
    assert path.stat().st_size < 1e6
    words = words_of(path)
    assert "There are 60 traces; the 40 newest are shown." in words
    assert "The 3 newest of 40 windows follow in detail." in words
    assert all(chart["count"] == 1000 and len(chart["steps"]) <= 60 for chart in blocks_of(data_of(path), "steps"))
    assert "3,000 values, drawn as at most 400 points" in words
    assert "5 of 120 layers are drawn" in words
    assert "1 values are NaN or infinite" in words


def test_the_newest_window_comes_first(tmp_path):
    for index, scale in enumerate([1.0, 2.0]):
        write_window(tmp_path, summary(scale=scale), f"plugins/profile/2026_01_01_00_00_0{index}")
    words = words_of(write_report(tmp_path))
    assert '["Step time, median", 20, "ms"]' in words
    assert words.index("Window 2026_01_01_00_00_01") < words.index("Window 2026_01_01_00_00_00")
    assert '["2026_01_01_00_00_00", 20, 10, 30, 0.5, 0.075, 0.025, 0.25, 0.1, 0.05]' in words


def test_the_first_worker_is_the_one_at_the_top(tmp_path):
    write_window(tmp_path, summary())
    second = summary(scale=2.0)
    second = dataclasses.replace(second, run=dataclasses.replace(second.run, worker=1))
    write_window(tmp_path, second, "plugins/profile/2026_01_02_03_04_06-worker-1")
    words = words_of(write_report(tmp_path))
    assert '["Step time, median", 10, "ms"]' in words
    assert "Window 2026_01_02_03_04_06-worker-1" in words


def test_several_runs_in_a_folder_are_named(tmp_path):
    for name in ("one", "other"):
        make_run(tmp_path / name)
    words = words_of(write_report(tmp_path))
    assert "There are several runs: one/, other/. To see the telemetry of one, pass its folder." in words
    assert "several runs" not in words_of(write_report(tmp_path / "one"))


def test_telemetry_alone_will_do(tmp_path):
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, telemetry_rows(5, 2))
    words = words_of(write_report(tmp_path))
    assert "No part of this run was traced." in words
    assert "Gradient by layer" in words


def test_what_was_run_is_not_made_up(tmp_path):
    write_window(tmp_path, ProfileSummary(steps=summary().steps))
    words = words_of(write_report(tmp_path))
    assert "not known: neither run.json nor a summary of ours is there" in words
    assert "float32" not in words


def test_a_window_without_steps_says_so(tmp_path):
    write_window(tmp_path, ProfileSummary(notes=("No steps: the trace holds only the compilation.",)))
    words = words_of(write_report(tmp_path))
    assert "This trace shows no steps." in words
    assert "the trace holds only the compilation" in words


def test_a_summary_that_is_broken_is_named(tmp_path):
    make_run(tmp_path)
    path = write_window(tmp_path, summary(), "plugins/profile/2026_09_09_09_09_09")
    path.write_text(path.read_text()[:100])
    words = words_of(write_report(tmp_path))
    assert "keras_paragrad.json in 2026_09_09_09_09_09 can't be read (ValueError" in words
    assert '["Step time, median", 10, "ms"]' in words


def test_what_was_not_clipped_is_drawn_once(tmp_path):
    rows = [
        (number, 0, layer, layer and "kernel", quantity, 1.0 + number)
        for number in range(5)
        for layer in ("", "dense")
        for quantity in ("gradient_norm", "clipped_gradient_norm")
    ]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows)
    page = data_of(write_report(tmp_path))
    (whole,) = blocks_of(page, "lines")
    assert [line["name"] for line in whole["lines"]] == ["before clipping"]
    assert [block["title"] for block in blocks_of(page, "layers")] == ["Gradient by layer, L2 norm"]


def test_a_loss_without_a_scale_has_no_chart_of_it(tmp_path):
    rows = [(number, 0, "", "", quantity, 1.0) for number in range(5) for quantity in ("loss_scale", "learning_rate")]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows)
    words = words_of(write_report(tmp_path))
    assert "Learning rate" in words
    assert "Loss scale" not in words


def test_layers_are_drawn_and_variables_are_listed(tmp_path):
    rows = [
        (number, 0, "dense", variable, "gradient_norm", number + 1.0)
        for number in range(5)
        for variable in ("kernel", "bias", "")
    ]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows)
    (block,) = blocks_of(data_of(write_report(tmp_path)), "layers")
    assert [line["name"] for line in block["chart"]["lines"]] == ["dense"]
    assert [line["name"] for line in block["lines"]] == ["dense/kernel", "dense/bias", "dense"]


def test_what_is_0_throughout_has_no_chart(tmp_path):
    values = {"mfu": 0.0, "examples_per_second": 5.0}
    write_rows(tmp_path / "throughput.csv", THROUGHPUT, [(n, 0, *pair) for n in range(5) for pair in values.items()])
    gone = {"nonfinite": 0.0, "gradient_norm": 0.0}
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, [(0, 0, "", "", *pair) for pair in gone.items()])
    # A gradient of 0 is worth knowing.
    assert titles(write_report(tmp_path)) == ["Throughput, examples per second", "Gradient of the whole model, L2 norm"]


def test_it_goes_where_it_is_told(tmp_path):
    run = make_run(tmp_path / "run")
    path = tmp_path / "pages" / "mine.html"
    assert write_report(run, path) == path
    assert [file.name for file in path.parent.iterdir()] == ["mine.html"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda path: None, "doesn't exist. Pass the log_dir", id="missing"),
        pytest.param(lambda path: path.write_text(""), "is a file. Pass the log_dir", id="file"),
        pytest.param(lambda path: path.mkdir(), r"no file \*.xplane.pb in it or in a folder below", id="empty"),
        pytest.param(
            lambda path: write_window(path, ProfileSummary()).write_text("{}"),
            r"can't be read \(KeyError: 'run'\)",
            id="broken",
        ),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path, make, expected, capsys):
    make(tmp_path / "logs")
    with pytest.raises(FileNotFoundError, match=expected):
        write_report(tmp_path / "logs")
    assert main(["report", str(tmp_path / "logs")]) == 1
    assert re.search(expected, capsys.readouterr().err)


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, capsys):
    path = write_report(make_run(tmp_path))
    before = path.read_text()
    monkeypatch.setattr("pathlib.Path.replace", _no_space)
    assert main(["report", str(tmp_path)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert path.read_text() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("content", ["", "<html>of pytest</html>"], ids=["empty", "another"])
def test_a_file_that_is_no_report_is_not_replaced(content, tmp_path, capsys):
    make_run(tmp_path)
    (tmp_path / "report.html").write_text(content)
    assert main(["report", str(tmp_path)]) == 1
    assert "report.html is not a report of keras_paragrad, and was not replaced" in capsys.readouterr().err
    with pytest.raises(FileExistsError, match="throughput.csv is not a report"):
        write_report(tmp_path, tmp_path / "throughput.csv")
    assert (tmp_path / "report.html").read_text() == content
    assert (tmp_path / "throughput.csv").read_text().startswith("step,epoch,")
    path = write_report(tmp_path, tmp_path / "other.html")
    assert write_report(tmp_path, path) == path


def _no_space(*_):
    raise OSError("No space left on device")


def test_the_command(tmp_path, capsys):
    one = make_run(tmp_path / "one")
    assert main(["report", str(one)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(one / "report.html")
    assert "explained by: keras-paragrad docs guides/profiling" in printed.err
    assert main(["report", str(one), "--output", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").exists()
    with pytest.raises(SystemExit):
        main(["report"])


def test_run_json_counts_more_than_a_window(tmp_path):
    make_run(tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**found, "model": "renamed"}))
    words = words_of(write_report(tmp_path))
    assert "Profile of renamed" in words
    assert f"Made by keras_paragrad {keras_paragrad.__version__}." in (tmp_path / "report.html").read_text("utf-8")


def test_operations_times_are_those_of_a_step(tmp_path):
    operations = (OperationTime("m/first/MatMul", "MatMul", "first", 10, 30.0, 0.75),)
    steps = tuple(StepTime(step, step, 4.0 * step, 4.0, compute=4.0) for step in range(10))
    write_window(tmp_path / "steps", ProfileSummary(steps=steps, operations=operations))
    write_window(tmp_path / "none", ProfileSummary(operations=operations))
    with_steps, without = (words_of(write_report(tmp_path / name)) for name in ("steps", "none"))
    assert "self time per batch" in with_steps and '["m/first/MatMul", 3, 0.75' in with_steps
    assert "self time per batch" not in without and '["m/first/MatMul", 30, 0.75' in without
