"""`ProfileSchedule`: which batches of a training are traced."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from keras_paragrad.arguments import check_integer

# A trace's size grows with the batches it covers, and TensorBoard reads all of it.
MOST_ACTIVE = 200


class TraceWindow(NamedTuple):
    """A range of batches, counted from 0: the profiler starts at `warmup`, and records from `begin` up to `end`."""

    warmup: int
    begin: int
    end: int


@dataclass(frozen=True)
class ProfileSchedule:
    """When trace windows happen, in batches: `skip_first` once, then `wait`, `warmup` and `active` per window.

    With `steps_per_execution`, windows are aligned to calls of the train function; with gradient accumulation, to
    updates.

    Args:
        skip_first: Batches skipped before the first window, while functions compile and caches fill.
        wait: Untraced batches before each window.
        warmup: Batches that are traced and discarded, as starting the profiler takes time.
        active: Batches that are traced and kept, at most 200.
        repeat: Number of windows, or `None` for as many as fit into the training.

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
                f"`active` is {self.active}, but a window may have at most {MOST_ACTIVE} batches, so that TensorBoard "
                f"can load its trace. Write active=20 and repeat={-(-self.active // 20)} to trace several windows."
            )

    def window(self, index: int) -> TraceWindow | None:
        """The window at `index`, counted from 0, or `None` if there are fewer."""
        if self.repeat is not None and index >= self.repeat:
            return None
        warmup = self.skip_first + index * (self.wait + self.warmup + self.active) + self.wait
        return self.window_at(warmup)

    def window_at(self, batch: int) -> TraceWindow:
        """A window whose warm-up starts at a batch."""
        return TraceWindow(batch, batch + self.warmup, batch + self.warmup + self.active)


DEFAULT = ProfileSchedule()
