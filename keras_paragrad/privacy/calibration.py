"""Calibration to a privacy budget: the least noise, and the most updates, that it allows."""

import functools
import math
from collections.abc import Callable

from keras_paragrad.arguments import check_integer, check_number
from keras_paragrad.privacy.accounting import epsilon, find_accountant

MIN_NOISE, _MAX_NOISE = 2.0**-6, 2.0**160


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
        ValueError: An argument is out of its range, or no noise meets the target: truncation alone exceeds delta, or
            target and delta are close to 0.
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
        # The fast accountant's noise is enough, and close.
        high, step = noise_multiplier(target_epsilon, sampling_rate, updates, delta, truncation=truncation), 0.9

    @functools.cache
    def excess(noise: float) -> float:
        """log(epsilon / target), above 0 with too little noise; almost linear, and finite for any epsilon."""
        ratio = epsilon(noise, sampling_rate, updates, delta, accountant, truncation=truncation) / target_epsilon
        return math.log(min(max(ratio, 1e-9), 1e9))

    if excess(high) > 0 and excess(_MAX_NOISE) > 0:
        raise _unmet(target_epsilon, updates, delta, truncation)
    while excess(high) > 0:
        high *= 2
    low = max(high * step, MIN_NOISE)
    while low > MIN_NOISE and excess(low) <= 0:
        low, high = max(low * step, MIN_NOISE), low
    if excess(low) <= 0:
        return low
    from scipy.optimize import brentq  # pyright: ignore[reportMissingImports]

    # The target is met at `high`, and not at `low`. The root that brentq finds may be on either side.
    noise = brentq(excess, low, high, xtol=1e-300, rtol=tolerance / 4) * (1 + tolerance / 2)
    while excess(noise) > 0:
        noise *= 1 + tolerance
    return noise


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
        most: The largest number to return.

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
    start = 1
    if not find_accountant(accountant, "updates_within").fast:
        # The fast accountant allows no more, and little less.
        start = max(1, updates_within(target_epsilon, noise_multiplier, sampling_rate, delta, truncation=truncation))

    def is_met(count: int) -> bool:
        spent = epsilon(noise_multiplier, sampling_rate, count, delta, accountant, truncation=truncation)
        return spent <= target_epsilon

    return last_that(is_met, most, start)


def gradient_noise_multiplier(noise_multiplier: float, count_noise: float) -> float:
    """The noise multiplier that gradients need if a noisy count of examples is released with them.

    Clipping to a quantile (Andrew et al., 2021, https://arxiv.org/abs/1905.03871, Theorem 1) asks each example whether
    its norm is below the clip norm. The answers, less one half, are summed, so an example changes the sum by 1/2 at
    most, and noise of standard deviation `count_noise` is added. Both sums together are a Gaussian mechanism with the
    noise multiplier z if the gradients' is (z^-2 - (2 count_noise)^-2)^(-1/2).
    """
    noise = float(check_number("noise_multiplier", noise_multiplier, above=0, example=1.0))
    count = float(check_number("count_noise", count_noise, above=0, example=5.0))
    share = (noise / (2 * count)) ** 2
    if share >= 1:
        raise ValueError(
            f"`count_noise` is {count:g}, and must be above half of the noise multiplier, {noise:g}: the count alone "
            f"would exceed the budget. Write count_noise={5 * noise:.3g}, which takes 1 % of it."
        )
    return noise / (1 - share) ** 0.5


def _unmet(target_epsilon: float, updates: int, delta: float, truncation: float) -> ValueError:
    """The error if no noise meets the target."""
    # Whether truncation takes so little of delta that it isn't the cause.
    if updates * truncation * math.exp(min(target_epsilon, 700)) < delta / 2:
        return ValueError(
            f"No noise meets `target_epsilon` {target_epsilon:g} at `delta` {delta:g}: both are too small for Rényi "
            "divergences. Raise one of them."
        )
    return ValueError(
        f"No noise meets `target_epsilon` {target_epsilon:g}: draws are truncated so often that this alone exceeds "
        f"`delta`, {delta:g}. Raise the limit of rows in an update, until `truncation`, {truncation:g}, times "
        f"`updates`, {updates}, is small against `delta`."
    )


def last_that(is_met: Callable[[int], bool], limit: int, start: int) -> int:
    """The last number from 0 to `limit` that meets a condition, which all smaller ones meet too; 0 if none does.

    `start` is a guess of the result, above 0.
    """
    low, high = 0, min(start, limit)
    while is_met(high):
        if high == limit:
            return limit
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low
