"""A window's figures as text."""

import io

import pytest
from rich.console import Console

from keras_paragrad.profiling.summary import Advice, OperationTime, ProfileSummary, StepTime
from keras_paragrad.profiling.tracer import WIDTH, WindowFigures, print_figures

pytestmark = pytest.mark.fast

STEPS = tuple(
    StepTime(20 + n, n, 4.0 * n, 4.0, input=2.0, host=0.5, compute=1.0, collective=0.3, idle=0.2) for n in range(9)
)
SUMMARY = ProfileSummary(
    steps=(*STEPS, StepTime(29, 9, 36.0, 14.0, input=12.0, compute=2.0)),
    operations=(
        OperationTime("m/first/MatMul", "_MklMatMul", "first", 10, 30.0, 0.75),
        OperationTime("adam/Mul", "Mul", "", 20, 10.0, 0.25),
    ),
    peak_memory={"host": 512 * 2**20, "CPU:0": None},
    advice=Advice("input", "Prefetch.", "60% of the step waits for input"),
    notes=("There is no GPU.",),
)


def test_every_figure_is_there():
    text = str(WindowFigures(SUMMARY, "my logs"))
    for part in (
        "batches 20 to 29: 4.00 ms per batch (median), 9.50 ms (p95)",
        "60.0%  ██████████████  waiting for input",
        "22.0%",
        "MatMul     first     10         3.00  75%",
        "Mul        -         20         1.00  25%",
        "Peak memory: host 512 MiB, CPU:0 n/a",
        "60% of the step waits for input: Prefetch.",
        "There is no GPU.",
        "tensorboard --logdir 'my logs'",
    ):
        assert part in text, text


def test_no_line_is_wider_than_it_may_be():
    assert max(map(len, str(WindowFigures(SUMMARY, "logs")).splitlines())) <= WIDTH


def test_without_steps_it_says_so():
    text = str(WindowFigures(ProfileSummary(notes=("There are no step markers.",)), "logs"))
    assert text.startswith("Profile without steps\nPeak memory: n/a\nThere are no step markers.")


@pytest.mark.parametrize("width", [40, 200])
def test_rich_prints_it_in_any_width(width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(WindowFigures(SUMMARY, "logs"))
    assert "waiting for input" in console.export_text()


def test_a_file_gets_plain_text(capsys):
    print_figures(WindowFigures(SUMMARY, "logs"))
    printed = capsys.readouterr().out
    assert "Profile of batches" in printed and "\x1b" not in printed
