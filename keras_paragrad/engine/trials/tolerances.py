"""Tolerances of the trials and the proof: relative differences up to these are rounding, not findings."""

from typing import NamedTuple


class Tolerance(NamedTuple):
    """A tolerance in single and in half precision."""

    single: float
    half: float

    def of(self, half_precision: bool) -> float:
        """The tolerance of values computed in this precision."""
        return self.half if half_precision else self.single


# Relative to a gradient's norm; faults are off by 1e-4 and more. A difference must also exceed this multiple of the
# noise from another order of the rows, another seed, or other last digits.
GRADIENT, TIMES_NOISE = Tolerance(1e-4, 3e-2), 10
# Relative to a metric's result on the first batch.
METRIC = Tolerance(1e-3, 3e-2)
# Entries of gradients: relative to the weight's largest entry, and to the largest entry of all.
OF_WEIGHT, OF_ALL = 1e-3, Tolerance(1e-5, 3e-2)
# Relative to the losses that layers add.
ADDED = 1e-3
# Relative to the largest output. Products of different batch sizes are rounded differently.
OUTPUT, OUTPUT_OF_PART = Tolerance(1e-5, 0.05), Tolerance(1e-3, 0.05)
# Relative to the largest loss of an element.
LOSS = 1e-5
# Relative to a state, and to its change: a slow state's differences are small, while large numbers round.
STATE, STATE_CHANGE, STATE_ROUNDING = 1e-4, 1e-3, 3e-7
# Smaller values have no relative error.
TINY = 1e-6
