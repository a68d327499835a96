"""`ProfileSchedule`: which batches of a training are traced."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from keras_paragrad.arguments import check_integer

# What a trace takes on disk grows with what it covers, and TensorBoard reads all of it.
MOST_ACTIVE = 200


class TraceWindow(NamedTuple):
    """A part of a training, in batches counted from 0: the profiler runs from `warmup`, and counts `begin` to `end`."""

    warmup: int
    begin: int
    end: int


@dataclass(frozen=True)
class ProfileSchedule:
    """When windows are traced, in batches: after `skip_first` once, each takes `wait`, `warmup` and `active`.

    Where a call runs several batches (`steps_per_execution`), a window begins and ends with a call. Where an update
    takes several batches, it begins with the next update and ends with one.

    Args:
        skip_first: Batches before the first window: those that compile, and those that fill caches.
        wait: Batches before each window in which nothing happens.
        warmup: Batches that are traced and thrown away, as the profiler's own start takes time.
        active: Batches that are traced and kept, at most 200.
        repeat: How many windows there are, or `None` for as many as the training has batches for.

    Raises:
        ValueError: A number is out of range. The message says which are in range.

    Example:

    >>> from keras_paragrad import ProfileSchedule
    >>> schedule = ProfileSchedule(skip_first=10, wait=5, warmup=1, active=4, repeat=2)
    >>> [schedule.window(index) for index in (0, 1)]
    [TraceWindow(warmup=15, begin=16, end=20), TraceWindow(warmup=25, begin=26, end=30)]
    >>> schedule.window(2) is None
    True
    """

    skip_first: int = 10
    wait: int = 0
    warmup: int = 2
    active: int = 10
    repeat: int | None = 1

    def __post_init__(self):
        for field in fields(self):
            least = 1 if field.name in ("active", "repeat") else 0
            optional = field.name == "repeat"
            value = check_integer(field.name, getattr(self, field.name), least=least, optional=optional)
            object.__setattr__(self, field.name, value)
        if self.active > MOST_ACTIVE:
            raise ValueError(
                f"`active` is {self.active}, and a window has at most {MOST_ACTIVE} batches, so that its trace stays "
                f"small enough to look at. Write active=20, and repeat={-(-self.active // 20)} for more of them."
            )

    def window(self, index: int) -> TraceWindow | None:
        """The window of a number counted from 0, or `None` if there are not so many."""
        if self.repeat is not None and index >= self.repeat:
            return None
        warmup = self.skip_first + index * (self.wait + self.warmup + self.active) + self.wait
        return self.window_at(warmup)

    def window_at(self, batch: int) -> TraceWindow:
        """A window that begins to warm up with a batch."""
        return TraceWindow(batch, batch + self.warmup, batch + self.warmup + self.active)


DEFAULT = ProfileSchedule()
