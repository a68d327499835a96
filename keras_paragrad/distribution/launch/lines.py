"""Whole lines out of a stream, also one that redraws its last line as progress bars do."""

import codecs
import re
import time
from collections.abc import Callable

# How a bar goes back to where its line began.
_BACK = re.compile("[\b]*\r")
# A line is cut after so many characters, so that a stream without any line can't fill the memory.
_LONGEST = 1 << 20


class Lines:
    """Cuts what a process writes into lines that read well in a log.

    A line that is redrawn, by returning to its beginning, is one line: as it was when it ended. While it goes on, it
    is given as it is every now and then.

    Args:
        interval: Seconds between two sights of a line that is redrawn.
        clock: What tells the seconds.

    Example:

    >>> lines = Lines()
    >>> lines.feed(b"loading\\n1/3 [=  ]")
    ['loading']
    >>> lines.feed(b"\\r2/3 [== ]\\r3/3 [===]\\n")
    ['3/3 [===]']
    >>> lines.feed(b"no end"), lines.close()
    ([], ['no end'])
    """

    def __init__(self, interval: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._interval = interval
        self._clock = clock
        self._shown = clock()
        # Bytes that are not UTF-8 come out as they went in.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Takes what was written.

        Args:
            data: The bytes.

        Returns:
            The lines that are complete, without their ends.
        """
        *ended, rest = (self._rest + self._decoder.decode(data)).split("\n")
        lines = [*map(_last_sight, ended), *self._unfinished(rest)]
        if lines:
            self._shown = self._clock()
        return lines

    def close(self) -> list[str]:
        """The line that never ended, if there is one."""
        last = _last_sight(self._rest + self._decoder.decode(b"", final=True))
        self._rest = ""
        return [last] if last else []

    def _unfinished(self, rest: str) -> list[str]:
        """Keeps what there is of a line, and gives it if it is too long or has been redrawn for long enough."""
        *before, last = _BACK.split(rest)
        sights = [sight for sight in before if sight.strip()]
        redrawn = bool(sights) and bool(last.strip("\b"))
        # Until something is drawn over it, the last sight stands: the line may end here.
        self._rest = last if redrawn or not sights else f"{sights[-1]}\r{last}"
        if len(self._rest) > _LONGEST:
            too_long, self._rest = self._rest, ""
            return [_last_sight(too_long)]
        due = self._clock() - self._shown >= self._interval
        return [_rubbed_out(sights[-1])] if redrawn and due else []


def _last_sight(line: str) -> str:
    """What a terminal would show of a line in the end."""
    sights = [sight for sight in _BACK.split(line) if sight.strip()]
    return _rubbed_out(sights[-1]) if sights else ""


def _rubbed_out(sight: str) -> str:
    """Without the characters that a backspace follows, and what was there before the line was rubbed out at its end."""
    kept = []
    for character in sight.rstrip("\b"):
        if character == "\b":
            del kept[-1:]
        else:
            kept.append(character)
    return "".join(kept)
