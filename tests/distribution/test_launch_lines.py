"""Whole lines out of any pieces, and progress bars that can be read in a log."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from keras_paragrad.distribution.launch import member as module
from keras_paragrad.distribution.launch.lines import EpochLines, Errors, Kind, Tracebacks
from keras_paragrad.distribution.launch.member import Lines

pytestmark = pytest.mark.fast


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def read(*pieces: bytes) -> list[str]:
    lines = Lines()
    return [line for piece in pieces for line in lines.feed(piece)] + lines.close()


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"windows\r\nunix\n", ["windows", "unix"]),
        (b"1/2\r2/2\n", ["2/2"]),
        (b"1/2\b\b\b\r2/2\b\b\b\r\n", ["2/2"]),
        (b"1/2\r2/2\r", ["2/2"]),
        (b"busy |\b/\b-\b done\n", ["busy  done"]),
        (b"busy |\b\b\b", ["busy |"]),
        ("\u2501\u2501 \U0001f600\b!\n".encode(), ["\u2501\u2501 !"]),
        (b"", []),
        (b"\n", [""]),
        (b"bytes \xff\xfe\n", ["bytes \udcff\udcfe"]),
        (b"cut \xe2\x94", ["cut \udce2\udc94"]),
    ],
    ids=[
        "lines", "no end", "windows", "bar", "keras bar", "bar without end", "spinner", "rubbed out", "wide characters",
        "nothing", "empty line", "not text", "cut character",
    ],
)  # fmt: skip
def test_what_is_shown(written, shown):
    assert read(written) == shown


pieces = st.lists(st.sampled_from(["a", "bc", "\n", "\r", "\b", "\u2501", "\r\n", "\b\b\r"]), max_size=30).map("".join)


@given(pieces.map(str.encode), st.lists(st.integers(0, 60)))
def test_pieces_make_no_difference(written, cuts):
    cuts = sorted({0, len(written), *(cut for cut in cuts if cut < len(written))})
    assert read(*(written[a:b] for a, b in zip(cuts, cuts[1:], strict=False))) == read(written)


def test_a_long_bar_is_shown_now_and_then():
    clock = Clock()
    lines = Lines(interval=10, clock=clock)
    shown = []
    for step in range(1, 31):
        clock.seconds = step
        shown += [(step, line) for line in lines.feed(f"\b\b\b\b\b\r{step:2}/30".encode())]
    assert shown == [(10, " 9/30"), (20, "19/30"), (30, "29/30")]
    assert lines.feed(b"\n") == ["30/30"]


def test_a_stream_without_lines_does_not_pile_up(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST", 100)
    lines = Lines()
    given_back = [line for _ in range(100) for line in lines.feed(b"x" * 30)] + lines.close()
    assert "".join(given_back) == "x" * 3000
    assert max(map(len, given_back)) < 131


KERAS = [
    "Epoch 1/20",
    "\x1b[1m23/23\x1b[0m \x1b[32m\u2501\x1b[0m\x1b[37m\x1b[0m \x1b[1m5s\x1b[0m 11ms/step - acc: 0.2 - val_loss: 2.0",
    "23/23 \u2501\u2501\u2501 0s 900us/step - loss: nan",
    " 1/23 \u2501\u2501\u2501 1:02 2s/step - loss: 2.1813e-05   ",
    "     12/Unknown 3s 115ms/step - mean_squared_error: -1.5",
    "23/23 - 5s - 217ms/step - accuracy: 0.25 - learning_rate: 1.0000e-03",
]


@pytest.mark.parametrize("line", KERAS)
def test_lines_about_epochs_are_left_out(line):
    assert EpochLines().filter([line, "", " ", "the next", ""]) == ["the next", ""]


@pytest.mark.parametrize(
    "line",
    [
        "Epoch 1/20 begins",
        "23/23 files are read, 5ms/step",
        "23/23 \u2501\u2501\u2501 0s 9ms/step - loss: 0.5 and my own words",
        "23/23 \u2501\u2501\u2501 0s 9ms/step - confusion: [1. 2.]",
        "loss: 0.5",
        "",
    ],
)
def test_other_lines_stay(line):
    assert EpochLines().filter([line]) == [line]


HEADER, FRAME = "Traceback (most recent call last):", '  File "train.py", line 3, in <module>'
LOG = "E0000 00:00:1795862306.568517   12751 cuda_platform.cc:52] failed call to cuInit"


def shown(tracebacks, lines):
    return [*tracebacks.feed(lines), *tracebacks.release()]


def test_tracebacks_are_held_until_they_are_whole():
    errors, clock = Errors(), Clock()
    tracebacks = Tracebacks("worker 0", errors, clock)
    assert tracebacks.pause is None
    assert tracebacks.feed(["before", HEADER, FRAME, LOG]) == [(Kind.OTHER, ["before"]), (Kind.OTHER, [LOG])]
    assert tracebacks.pause
    assert tracebacks.feed(["ValueError: no", "", "more of it"]) == []
    assert tracebacks.release() == [(Kind.ERROR, [HEADER, FRAME, "ValueError: no", "", "more of it"])]
    assert tracebacks.pause is None and tracebacks.release() == []


def test_no_line_is_held_for_long():
    clock = Clock()
    tracebacks = Tracebacks("worker 0", Errors(), clock)
    assert tracebacks.feed([HEADER, FRAME, "ValueError: no"]) == []
    clock.seconds = 3
    assert tracebacks.feed(["while it runs"]) == [(Kind.ERROR, [HEADER, FRAME, "ValueError: no", "while it runs"])]
    assert tracebacks.feed([HEADER, *["x"] * 3000])[0][0] is Kind.ERROR


def test_who_failed_alike_is_said_and_what_differs_is_not_alike():
    errors = Errors()
    for index, said in enumerate(["a:4001 at 0x7f", "a:4002 at 0x8f", "b:4002 at 0x8f", "a:4003 at 0x9f"]):
        ((kind, _),) = shown(Tracebacks(f"worker {index}", errors), [HEADER, FRAME, f"ValueError: {said}"])
        assert kind is (Kind.ERROR if index in (0, 2) else Kind.REPEATED)
    assert errors.in_words() == [
        "worker 1 and worker 3 failed with the same traceback as worker 0: ValueError: a:4001 at 0x7f"
    ]


@pytest.mark.parametrize(
    "exception",
    ["KeyboardInterrupt", "keras_paragrad.distribution.checkpoint.interruptions.WorkerLostError: Worker 0 of 2 lost",
     "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:"],
)  # fmt: skip
def test_what_follows_from_the_end_of_another(exception):
    cause = [
        HEADER,
        FRAME,
        "OSError: connection",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
    ]
    ((kind, _),) = shown(Tracebacks("worker 0", Errors()), [*cause, HEADER, FRAME, exception])
    assert kind is Kind.CONSEQUENCE
