"""Passes standard error on, without TensorFlow's log lines. Run by path; needs only the standard library.

It is a separate process, so that the last output of a killed process passes too. A line `FAILED` says that the
command has failed: the lines held back may say why, and are printed.
"""

import contextlib
import re
import sys
from collections import deque

FAILED = b"\0keras-paragrad: failed\n"
_LOG_LINE = re.compile(
    rb"[IWE]\d{4} \d\d:\d\d:\d+\.|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] |"
    rb"(?:INFO|WARNING|ERROR):(?:tensorflow|absl):|WARNING: All log messages before absl::InitializeLog|"
    rb"To enable the following instructions:"
)
# How many log lines are held back; older ones are dropped.
_MOST = 100


def main() -> None:
    """Filters standard input until it ends."""
    held = deque[bytes](maxlen=_MOST)
    for line in sys.stdin.buffer:
        if line == FAILED:
            passed = [b"TensorFlow's log:\n", *held] if held else []
        elif _LOG_LINE.match(line):
            held.append(line)
            continue
        else:
            passed = [line]
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.buffer.write(b"".join(passed))
            sys.stderr.buffer.flush()


if __name__ == "__main__":
    main()
