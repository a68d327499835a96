"""Step statistics of a window: median, 95th percentile and shares."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_paragrad.profiling.summary import PARTS as PARTS
from keras_paragrad.profiling.summary import StepTime, shares_of

IN_WORDS = {
    "input": "waiting for input",
    "host": "host",
    "compile": "compiling",
    "compute": "compute",
    "collective": "collectives",
    "idle": "idle",
}


@dataclass(frozen=True)
class StepFigures:
    """The step times of a window, in milliseconds.

    Attributes:
        count: How many steps there were.
        median: Half of them took no longer.
        p95: 95 of 100 took no longer.
        shortest: The shortest of them.
        longest: The longest of them.
        shares: The share of the total time of each part of a step.
    """

    count: int
    median: float
    p95: float
    shortest: float
    longest: float
    shares: dict[str, float]


def figures_of(steps: Sequence[StepTime]) -> StepFigures | None:
    """The statistics of some steps, or `None` if there are none.

    Example:

    >>> from keras_paragrad.profiling.report.figures import figures_of
    >>> from keras_paragrad.profiling.summary import StepTime
    >>> figures = figures_of([StepTime(0, 0, 0.0, 4.0, input=3.0, compute=1.0)])
    >>> figures.median, figures.shares["input"]
    (4.0, 0.75)
    """
    if not steps:
        return None
    durations = np.array([step.duration for step in steps])
    return StepFigures(
        count=len(steps),
        median=float(np.median(durations)),
        p95=float(np.percentile(durations, 95)),
        shortest=float(durations.min()),
        longest=float(durations.max()),
        shares=shares_of(steps),
    )
