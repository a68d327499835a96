"""Whole lines out of any pieces, and progress bars that can be read in a log."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from keras_paragrad.distribution.launch import member as module
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
