"""What updates cost together."""

import math
from collections.abc import Callable, Sequence

from keras_paragrad.arguments import check_integer, check_number
from keras_paragrad.privacy.accounting.accountants import Updates, find_accountant


def epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    updates: int,
    delta: float,
    accountant: str = "rdp",
    *,
    truncation: float = 0.0,
) -> float:
    """Epsilon of training with DP-SGD, for data that differ by one example added or removed.

    For updates with the Gaussian mechanism on Poisson samples: each example is drawn into an update with the sampling
    rate, independently of all others. Of batches from shuffled data it is not true, and lies below their epsilon.

    Args:
        noise_multiplier: Standard deviation of the noise, in units of the clip norm.
        sampling_rate: Probability of each example to be drawn into an update: expected batch size / examples. An update
            is drawn once, also if it is computed in several physical batches.
        updates: Number of updates, which are alike; see `composed_epsilon` for others.
        delta: Above 0 and below 1; smaller than 1 / examples.
        accountant: `"rdp"` for Rényi divergences (Mironov et al., 2019, https://arxiv.org/abs/1908.10530), or
            `"pld"` for privacy loss distributions (Koskela et al., 2020, https://arxiv.org/abs/1906.03049), which gives
            less and takes longer; below a noise multiplier of 0.01, and wherever that is less, it is `"rdp"`.
        truncation: Of draws that are cut at a limit, `truncation_probability`.

    Returns:
        Epsilon, an upper bound; infinite without noise, or if truncation alone takes more than delta.

    Raises:
        ValueError: An argument is out of its range.
        MissingExtraError: dp-accounting is not installed.

    Example:

    >>> from keras_paragrad.privacy import epsilon
    >>> round(epsilon(1.1, 256 / 60_000, updates=60 * 60_000 // 256, delta=1e-5), 3)
    2.597
    """
    return composed_epsilon([checked(noise_multiplier, sampling_rate, updates, truncation)], delta, accountant)


def composed_epsilon(parts: Sequence[Updates], delta: float, accountant: str = "rdp") -> float:
    """`epsilon` of updates of several kinds, one after another.

    Example:

    >>> from keras_paragrad.privacy.accounting.accountants import Updates
    >>> from keras_paragrad.privacy.accounting.composition import composed_epsilon
    >>> halves = [Updates(1.0, 0.01, 500), Updates(2.0, 0.01, 500)]
    >>> composed_epsilon(halves[1:], 1e-5) < composed_epsilon(halves, 1e-5)
    True
    """
    delta = check_number("delta", delta, above=0, below=1, example=1e-5)
    found = find_accountant(accountant, "epsilon")
    parts = [checked(*part) for part in parts]
    parts = [part for part in parts if part.updates and part.sampling_rate]
    if not parts:
        return 0.0
    if not all(part.noise_multiplier for part in parts):
        return math.inf
    # So rarely is the example drawn at all that delta allows for it.
    if sum(part.updates * part.sampling_rate for part in parts) <= delta:
        return 0.0
    truncated = sum(part.updates * part.truncation for part in parts)
    return with_truncation(found.compose(parts), delta, truncated)


def checked(noise_multiplier: float, sampling_rate: float, updates: int, truncation: float = 0.0) -> Updates:
    """`Updates` of checked arguments."""
    return Updates(
        float(check_number("noise_multiplier", noise_multiplier, least=0, example=1.0)),
        float(check_number("sampling_rate", sampling_rate, least=0, most=1, example=0.01)),
        check_integer("updates", updates, least=0, example=1000),
        float(check_number("truncation", truncation, least=0, most=1, example=0.0)),
    )


def with_truncation(spent: Callable[[float], float], delta: float, truncated: float) -> float:
    """The least epsilon, of those tried, at which `spent(delta - exp(epsilon) * truncated) <= epsilon`.

    Args:
        spent: Epsilon for a delta, of updates whose draws are not truncated.
        delta: Delta with truncation.
        truncated: The sum of all updates' `truncation_probability`.
    """
    found = spent(delta)
    if not truncated:
        return found
    for _ in range(100):
        left = delta - math.exp(found) * truncated if found < 700 else 0.0
        if left <= 0:
            break
        needed = spent(left)
        if needed <= found:
            return found
        # A little more than needed, so that it ends.
        found = needed + (needed - found) / 8 + 1e-12 * needed
    return math.inf
