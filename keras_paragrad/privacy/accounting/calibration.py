"""What a budget allows: how little noise, and how many updates."""

import math
from collections.abc import Callable

from keras_paragrad.arguments import check_integer, check_number
from keras_paragrad.privacy.accounting.composition import epsilon

# Relative, of the noise multiplier. A privacy loss distribution takes a second, and rounds to a grid.
_TOLERANCES = {"rdp": 1e-6, "pld": 1e-3}
LEAST_NOISE, _MOST_NOISE = 2.0**-6, 2.0**160


def noise_multiplier(
    target_epsilon: float,
    sampling_rate: float,
    updates: int,
    delta: float,
    accountant: str = "rdp",
    *,
    truncation: float = 0.0,
) -> float:
    """The least noise multiplier whose `epsilon` is no more than the target.

    Args:
        target_epsilon: Above 0.
        sampling_rate: Above 0; see `epsilon`.
        updates: Number of updates, at least 1.
        delta: See `epsilon`, as `accountant` and `truncation`.

    Returns:
        The noise multiplier, at most a millionth too large (with `"pld"`, a thousandth), never too small, and at
        least 1/64.

    Raises:
        ValueError: An argument is out of its range, or no noise meets the target: truncation takes all
            of delta, or target and delta are next to nothing.

    Example:

    >>> from keras_paragrad.privacy import epsilon, noise_multiplier
    >>> noise = noise_multiplier(3.0, sampling_rate=0.01, updates=2000, delta=1e-5)
    >>> round(noise, 3), round(epsilon(noise, 0.01, 2000, 1e-5), 3)
    (0.978, 3.0)
    """
    check_number("target_epsilon", target_epsilon, above=0, example=3.0)
    check_number("sampling_rate", sampling_rate, above=0, most=1, example=0.01)
    check_integer("updates", updates, least=1, example=1000)
    start = 1.0
    if accountant == "pld":
        # It takes as much noise or a little less, and far more time.
        start = noise_multiplier(target_epsilon, sampling_rate, updates, delta, truncation=truncation)

    def met(noise: float) -> bool:
        return epsilon(noise, sampling_rate, updates, delta, accountant, truncation=truncation) <= target_epsilon

    high = start
    while not met(high):
        high *= 2
        if high > _MOST_NOISE:
            raise _unmet(target_epsilon, updates, delta, truncation)
    step = 0.9 if accountant == "pld" else 0.5
    low = high * step
    while low >= LEAST_NOISE and met(low):
        low, high = low * step, low
    low = max(low, LEAST_NOISE)
    while high / low > 1 + _TOLERANCES[accountant]:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def updates_within(
    target_epsilon: float,
    noise_multiplier: float,
    sampling_rate: float,
    delta: float,
    accountant: str = "rdp",
    *,
    truncation: float = 0.0,
    most: int = 10**9,
) -> int:
    """How many updates a budget allows: the most whose `epsilon` is no more than the target.

    Args:
        target_epsilon: Above 0.
        noise_multiplier: See `epsilon`, as the arguments that follow.
        most: What is returned if more were allowed.

    Returns:
        A number of updates from 0 to `most`.

    Example:

    >>> from keras_paragrad.privacy import epsilon, updates_within
    >>> allowed = updates_within(3.0, 1.0, sampling_rate=0.01, delta=1e-5)
    >>> epsilon(1.0, 0.01, allowed, 1e-5) <= 3.0 < epsilon(1.0, 0.01, allowed + 1, 1e-5)
    True
    """
    check_number("target_epsilon", target_epsilon, above=0, example=3.0)
    check_integer("most", most, example=10**9)

    def met(count: int) -> bool:
        spent = epsilon(noise_multiplier, sampling_rate, count, delta, accountant, truncation=truncation)
        return spent <= target_epsilon

    start = 1
    if accountant == "pld":
        # It allows as many or more, and takes far more time.
        start = max(1, updates_within(target_epsilon, noise_multiplier, sampling_rate, delta, truncation=truncation))
    return last_that(met, most, start)


def _unmet(target_epsilon: float, updates: int, delta: float, truncation: float) -> ValueError:
    if updates * truncation * math.exp(min(target_epsilon, 700)) < delta / 2:
        return ValueError(
            f"No noise meets `target_epsilon` {target_epsilon:g} at `delta` {delta:g}: both are too small for Rényi "
            "divergences. Raise one of them."
        )
    return ValueError(
        f"No noise meets `target_epsilon` {target_epsilon:g}: draws are truncated so often that they alone take more "
        f"than `delta`, {delta:g}. Raise the limit of rows in an update, until `truncation`, {truncation:g}, times "
        f"`updates`, {updates}, is small against `delta`."
    )


def last_that(met: Callable[[int], bool], most: int, start: int) -> int:
    """The last number from 0 to `most` that meets a condition, which those before it meet too."""
    low, high = 0, min(start, most)
    while met(high):
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return low
