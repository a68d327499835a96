"""The parts of a step and their shares of the time, computed alike for terminal, report and advice."""

from collections.abc import Sequence

from keras_paragrad.profiling.summary import StepTime

PARTS = ("input", "host", "compute", "collective", "idle")


def shares_of(steps: Sequence[StepTime]) -> dict[str, float]:
    """The share of the total time of each part of a step.

    Example:

    >>> from keras_paragrad.profiling.parts import shares_of
    >>> from keras_paragrad.profiling.summary import StepTime
    >>> shares_of([StepTime(0, 0, 0.0, 4.0, input=3.0, compute=1.0)])["input"]
    0.75
    """
    total = sum(step.duration for step in steps) or 1.0
    return {part: sum(getattr(step, part) for step in steps) / total for part in PARTS}
