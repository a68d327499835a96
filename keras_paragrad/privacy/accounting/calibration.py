"""What a budget allows: how little noise, and how many updates."""

import functools
import math
from collections.abc import Callable

from keras_paragrad.arguments import check_integer, check_number
from keras_paragrad.privacy.accounting.accountants import find_accountant
from keras_paragrad.privacy.accounting.composition import epsilon

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
        MissingExtraError: dp-accounting is not installed.

    Example:

    >>> from keras_paragrad.privacy import epsilon, noise_multiplier
    >>> noise = noise_multiplier(3.0, sampling_rate=0.01, updates=2000, delta=1e-5)
    >>> round(noise, 3), round(epsilon(noise, 0.01, 2000, 1e-5), 3)
    (0.978, 3.0)
    """
    check_number("target_epsilon", target_epsilon, above=0, example=3.0)
    check_number("sampling_rate", sampling_rate, above=0, most=1, example=0.01)
    check_integer("updates", updates, least=1, example=1000)
    _, _, tolerance, fast = find_accountant(accountant, "noise_multiplier")
    high, step = 1.0, 0.5
    if not fast:
        # It takes as much noise or a little less, and far more time.
        high, step = noise_multiplier(target_epsilon, sampling_rate, updates, delta, truncation=truncation), 0.9

    @functools.cache
    def excess(noise: float) -> float:
        """Above 0 with too little noise: the logarithm of epsilon over its target, which is almost a line."""
        spent = epsilon(noise, sampling_rate, updates, delta, accountant, truncation=truncation)
        return math.log(min(max(spent / target_epsilon, 1e-9), 1e9))

    if excess(high) > 0 and excess(_MOST_NOISE) > 0:
        raise _unmet(target_epsilon, updates, delta, truncation)
    while excess(high) > 0:
        high *= 2
    low = max(high * step, LEAST_NOISE)
    while low > LEAST_NOISE and excess(low) <= 0:
        low, high = max(low * step, LEAST_NOISE), low
    if excess(low) <= 0:
        return low
    from scipy.optimize import brentq  # pyright: ignore[reportMissingImports]

    found = brentq(excess, low, high, xtol=1e-300, rtol=tolerance / 4) * (1 + tolerance / 2)
    while excess(found) > 0:
        found *= 1 + tolerance
    return found


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

    Raises:
        ValueError: An argument is out of its range.
        MissingExtraError: dp-accounting is not installed.

    Example:

    >>> from keras_paragrad.privacy import epsilon, updates_within
    >>> allowed = updates_within(3.0, 1.0, sampling_rate=0.01, delta=1e-5)
    >>> epsilon(1.0, 0.01, allowed, 1e-5) <= 3.0 < epsilon(1.0, 0.01, allowed + 1, 1e-5)
    True
    """
    check_number("target_epsilon", target_epsilon, above=0, example=3.0)
    check_integer("most", most, example=10**9)
    fast = find_accountant(accountant, "updates_within").fast

    def met(count: int) -> bool:
        spent = epsilon(noise_multiplier, sampling_rate, count, delta, accountant, truncation=truncation)
        return spent <= target_epsilon

    start = 1
    if not fast:
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
