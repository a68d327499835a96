"""Edits the profiler's trace files."""

import bisect
from collections.abc import Sequence
from pathlib import Path

from keras_paragrad.compat.private import XSpace

_PICOSECONDS_PER_NANOSECOND = 1000


def write_events_within(file: Path, target: Path, spans: Sequence[tuple[float, float]]) -> None:
    """Copies an `.xplane.pb` file without the events that begin outside of some spans.

    Args:
        file: The file.
        target: The copy.
        spans: Disjoint and in order, in nanoseconds.
    """
    space = XSpace.FromString(file.read_bytes())
    begins = [begin for begin, _ in spans]
    for plane in space.planes:
        for line in plane.lines:
            kept = []
            for event in line.events:
                begin = line.timestamp_ns + event.offset_ps / _PICOSECONDS_PER_NANOSECOND
                index = bisect.bisect_right(begins, begin) - 1
                if index >= 0 and begin <= spans[index][1]:
                    kept.append(event)
            if len(kept) < len(line.events):
                kept = [type(event).FromString(event.SerializeToString()) for event in kept]
                del line.events[:]
                line.events.extend(kept)
    target.write_bytes(space.SerializeToString())
