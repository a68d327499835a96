"""The tolerances of trials and of the proof: relative differences that rounding makes, and that are no finding."""

from typing import NamedTuple


class Tolerance(NamedTuple):
    """A tolerance in single and in half precision."""

    single: float
    half: float

    def of(self, half_precision: bool) -> float:
        """The tolerance of what is computed in this precision."""
        return self.half if half_precision else self.single


# On the first batch, of the gradient's norm; faults are off by 1e-4 and more. A finding is also this many times what
# another order of the rows, another seed, or other last digits change.
GRADIENT, TIMES_NOISE = Tolerance(1e-4, 3e-2), 10
# Of the result of a metric on the first batch, and of a number in the logs of a trial.
METRIC, NUMBER = Tolerance(1e-3, 3e-2), Tolerance(1e-4, 3e-2)
# On made-up rows, of an entry of the gradient: of the weight's largest entry, and of the largest of all.
OF_WEIGHT, OF_ALL = 1e-3, Tolerance(1e-5, 3e-2)
# On made-up rows, of the gradient's norm: in float32, and where GPUs multiply in TF32. Of the losses that layers add,
# alone: what is nearly balanced has a gradient of differences.
ROUNDING, ROUNDING_OF_TF32, ROUNDING_OF_ADDED = 3e-5, 1e-3, 1e-3
# Of the largest output. Batches of different sizes are multiplied with different rounding.
OUTPUT, OUTPUT_OF_PART = Tolerance(1e-5, 0.05), Tolerance(1e-3, 0.05)
# Of the largest loss of an element.
LOSS = 1e-5
# Of a state, and of its change: where it changes slowly, what differs is small, and large numbers round.
STATE, STATE_CHANGE, STATE_ROUNDING = 1e-4, 1e-3, 3e-7
# What is below has no relative error.
TINY = 1e-6
