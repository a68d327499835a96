"""The report as a file: what it says, that it needs nothing else, how large it gets, and what it can't show."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import re
import sys

import pytest
from sample_models.log_directories import (
    TELEMETRY,
    THROUGHPUT,
    WORKER,
    make_run,
    summary,
    telemetry_rows,
    throughput_rows,
    worker_rows,
    write_rows,
    write_window,
)

import keras_paragrad
from keras_paragrad.cli.main import main
from keras_paragrad.profiling.report import write_report
from keras_paragrad.profiling.summary import LayerTime, OperationTime, ProfileSummary, StepTime

pytestmark = pytest.mark.fast

EMPTY = {"meta", "link", "br", "img", "input", "hr", "wbr"}


class Page(html.parser.HTMLParser):
    """A page taken apart; fails where an element isn't closed."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.text, self.scripts = [], [], "", []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "wbr":
            self.text = self.text.removesuffix(" ")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text += data + " "

    def labels(self):
        return [attributes["aria-label"] for tag, attributes in self.tags if attributes.get("role") == "img"]

    @property
    def words(self):
        return re.sub(r"\s+", " ", self.text)


def test_it_says_what_was_measured(tmp_path):
    page = Page(write_report(make_run(tmp_path)))
    for expected in (
        "Profile of digits",
        "Step time, median 10 ms",
        "95th percentile 30 ms",
        "waiting for input: 50%",
        "collectives: 10%",
        "prefetch(tf.data.AUTOTUNE). Because: 50% of the step waits for input",
        "digits/dense/MatMul 1.5 ms 60% 40 MatMul dense",
        "<b>loss</b> & more",
        "block_with_a_long_name/multi_head_attention_1 1.5 ms 500 µs 800 µs 200 µs – 52%",
        "The chart shows 15 of 20 layers; the table lists all.",
        "Kind0 1.5 ms 10% 40",
        "3 other kinds 2.7 ms 12% 120",
        "Collectives take 2 ms per batch. 25% of this time is hidden",
        "allocator GPU_0_bfc 1 MiB (batch 100) 4.5 MiB 8 MiB (batch 100.8)",
        "host 3 GiB",
        "Layer names are those of the graph.",
        "Time to the first step 1.5 s",
        "FLOPs per step 3 GFLOP",
        "63 one_step_on_data float32[17, 784]",
        "AccumulatingOptimizer(Adam)",
        "1,234,567",
        "2026-01-02 03:04:05 UTC",
        "Worker 1 is the slowest: check its input",
        "worker 1 computes 8 ms per batch, the others 3 ms; the rest is spent waiting",
        "Batches 100 to 115 of each worker",
        "0 10 ms 3 ms 7 ms 70% 1 10 ms 8 ms 2 ms 20%",
        "Learning rate",
        "Loss scale",
        "Update to weights by layer",
        "1 values are NaN or infinite",
    ):
        assert expected in page.words, expected


def test_every_chart_is_told_in_words(tmp_path):
    page = Page(write_report(make_run(tmp_path)))
    labels = page.labels()
    charts = [attributes for tag, attributes in page.tags if tag == "figure"]
    assert len(labels) == len(charts) >= 12
    assert any("Median 10 ms, 95th percentile 30 ms" in label for label in labels)
    assert any("after clipping: smallest 1 (update 0)" in label for label in labels)
    drawn = [attributes for tag, attributes in page.tags if tag == "svg" and "role" not in attributes]
    inside = {"free", "view", "content"}
    assert all("aria-hidden" in attributes or attributes["class"] in inside for attributes in drawn)


def test_it_needs_nothing_else(tmp_path):
    page = Page(write_report(make_run(tmp_path)))
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any({"src", "href", "xlink:href"} & attributes.keys() for _, attributes in page.tags)
    styles = page.rawdata + " ".join(str(attributes.get("style", "")) for _, attributes in page.tags)
    assert re.findall(r"url\(([^)]*)\)|@import", styles) == []
    (policy,) = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


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
    words = Page(path).words
    assert "There are 60 traces; the 40 newest are shown." in words
    assert "The 3 newest of 40 windows follow in detail." in words
    assert "of 1,000 batches are drawn: the shortest and the longest of each span." in words
    assert "3,000 values, drawn as at most 400 points" in words
    assert "5 of 120 layers are drawn" in words
    assert "1 values are NaN or infinite" in words


def test_the_newest_window_comes_first(tmp_path):
    for index, scale in enumerate([1.0, 2.0]):
        write_window(tmp_path, summary(scale=scale), f"plugins/profile/2026_01_01_00_00_0{index}")
    words = Page(write_report(tmp_path)).words
    assert "Step time, median 20 ms" in words
    assert words.index("Window 2026_01_01_00_00_01") < words.index("Window 2026_01_01_00_00_00")
    assert "2026_01_01_00_00_00 20 10 ms 30 ms 50% 7.5% 2.5% 25% 10% 5.0%" in words


def test_the_first_worker_is_the_one_at_the_top(tmp_path):
    write_window(tmp_path, summary())
    second = summary(scale=2.0)
    second = dataclasses.replace(second, run=dataclasses.replace(second.run, worker=1))
    write_window(tmp_path, second, "plugins/profile/2026_01_02_03_04_06-worker-1")
    words = Page(write_report(tmp_path)).words
    assert "Step time, median 10 ms" in words
    assert "Window 2026_01_02_03_04_06-worker-1" in words


def test_several_runs_in_a_folder_are_named(tmp_path):
    for name in ("one", "other"):
        make_run(tmp_path / name)
    words = Page(write_report(tmp_path)).words
    assert "There are several runs: one/, other/. To see the telemetry of one, pass its folder." in words
    assert "several runs" not in Page(write_report(tmp_path / "one")).words


def test_telemetry_alone_will_do(tmp_path):
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, telemetry_rows(5, 2))
    words = Page(write_report(tmp_path)).words
    assert "No part of this run was traced." in words
    assert "Gradient by layer" in words


def test_what_was_run_is_not_made_up(tmp_path):
    write_window(tmp_path, ProfileSummary(steps=summary().steps))
    words = Page(write_report(tmp_path)).words
    assert "What was run not known: neither run.json nor a summary of ours is there" in words
    assert "float32" not in words


def test_a_window_without_steps_says_so(tmp_path):
    write_window(tmp_path, ProfileSummary(notes=("No steps: the trace holds only the compilation.",)))
    words = Page(write_report(tmp_path)).words
    assert "This trace shows no steps." in words
    assert "the trace holds only the compilation" in words


def test_a_summary_that_is_broken_is_named(tmp_path):
    make_run(tmp_path)
    path = write_window(tmp_path, summary(), "plugins/profile/2026_09_09_09_09_09")
    path.write_text(path.read_text()[:100])
    words = Page(write_report(tmp_path)).words
    assert "keras_paragrad.json in 2026_09_09_09_09_09 can't be read (ValueError" in words
    assert "Step time, median 10 ms" in words


def test_a_file_without_its_end_is_named(tmp_path):
    make_run(tmp_path)
    (tmp_path / "telemetry.csv").unlink()
    (tmp_path / "telemetry.parquet").write_bytes(b"PAR1 and no more")
    words = Page(write_report(tmp_path)).words
    assert "telemetry can't be read: it is damaged, or its run has not ended (ArrowInvalid" in words
    assert "Throughput" in words


def test_what_was_not_clipped_is_drawn_once(tmp_path):
    rows = [
        (number, 0, layer, layer and "kernel", quantity, 1.0 + number)
        for number in range(5)
        for layer in ("", "dense")
        for quantity in ("gradient_norm", "clipped_gradient_norm")
    ]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows)
    assert len(Page(write_report(tmp_path)).labels()) == 2


def test_a_loss_without_a_scale_has_no_chart_of_it(tmp_path):
    rows = [(number, 0, "", "", quantity, 1.0) for number in range(5) for quantity in ("loss_scale", "learning_rate")]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows)
    words = Page(write_report(tmp_path)).words
    assert "Learning rate" in words
    assert "Loss scale" not in words


def test_layers_are_drawn_and_variables_are_listed(tmp_path):
    rows = [
        (number, 0, "dense", variable, "gradient_norm", number + 1.0)
        for number in range(5)
        for variable in ("kernel", "bias", "")
    ]
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, rows)
    page = Page(write_report(tmp_path))
    (label,) = page.labels()
    assert "over the updates. dense: smallest 1 (update 0)" in label
    assert "dense/bias" in page.words


def test_workers_are_compared_in_the_window_that_all_have(tmp_path):
    run = make_run(tmp_path)
    rows = list(worker_rows(1, 24))
    # A run that was killed: the last row has no end, and its second window a single batch.
    write_rows(run / "worker_1_batches.csv", WORKER, [*rows[:25], (1, 101)])
    # Of an earlier run, with more workers.
    write_rows(run / "worker_2_batches.csv", WORKER, worker_rows(2, 24))
    words = Page(write_report(run)).words
    assert "Batches 100 to 100 of each worker" in words
    assert "worker 2" not in words
    (run / "worker_1_batches.csv").unlink()
    words = Page(write_report(run)).words
    assert "There are files of 1 of 2 workers. Copy worker_*_batches.csv of all to" in words
    assert "of each worker" not in words


def test_equal_workers_are_said_to_be_equal(tmp_path):
    run = make_run(tmp_path)
    write_rows(run / "worker_0_batches.csv", WORKER, worker_rows(1, 24))
    assert "The workers are about equally fast" in Page(write_report(run)).words


def test_what_is_0_throughout_has_no_chart(tmp_path):
    values = {"mfu": 0.0, "examples_per_second": 5.0}
    write_rows(tmp_path / "throughput.csv", THROUGHPUT, [(n, 0, *pair) for n in range(5) for pair in values.items()])
    gone = {"nonfinite": 0.0, "gradient_norm": 0.0}
    write_rows(tmp_path / "telemetry.csv", TELEMETRY, [(0, 0, "", "", *pair) for pair in gone.items()])
    # A gradient of 0 is worth knowing.
    drawn = [label.partition(",")[0] for label in Page(write_report(tmp_path)).labels()]
    assert drawn == ["Throughput", "Gradient of the whole model"]


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


def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(make_run(tmp_path))]) == 1
    assert "pip install 'keras_paragrad[profile]'" in capsys.readouterr().err


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
    words = Page(write_report(tmp_path)).words
    assert "Profile of renamed" in words
    assert keras_paragrad.__version__ in words


def test_operations_times_are_those_of_a_step(tmp_path):
    operations = (OperationTime("m/first/MatMul", "MatMul", "first", 10, 30.0, 0.75),)
    steps = tuple(StepTime(step, step, 4.0 * step, 4.0, compute=4.0) for step in range(10))
    write_window(tmp_path / "steps", ProfileSummary(steps=steps, operations=operations))
    write_window(tmp_path / "none", ProfileSummary(operations=operations))
    with_steps, without = (Page(write_report(tmp_path / name)).words for name in ("steps", "none"))
    assert "self time per batch" in with_steps and "m/first/MatMul 3 ms 75" in with_steps
    assert "self time per batch" not in without and "m/first/MatMul 30 ms 75" in without
