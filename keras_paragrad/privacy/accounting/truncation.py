"""Draws of at most so many rows: how often an example falls victim to the limit."""

import math

import numpy as np

from keras_paragrad.arguments import check_integer, check_number

# Above the rounding of a sum of some thousand terms, each good to 14 digits.
_SLACK = 1 + 1e-9


def truncation_probability(examples: int, sampling_rate: float, limit: int) -> float:
    """The probability that an update draws a certain example, and at least as many others as it has place for.

    An update has place for `limit` rows. Poisson sampling may draw more, and the excess is dropped, by any rule that
    looks at the drawn rows alone. This makes a guarantee of (epsilon, delta) one of (epsilon, delta + exp(epsilon) *
    updates * p), with the probability p that is returned, which `epsilon` and `noise_multiplier` take as `truncation`.

    Why: let data be D' or, with one example x more, D. Draw what an update takes of D' first, then toss whether x is
    drawn too. Unless x is drawn and there are `limit` others, nothing is dropped for x, and the update of D is that of
    D' with or without x: Poisson sampling of x, for which epsilon and delta hold. The exception has probability p, and
    updates times p in all updates. So outputs of D are within updates * p in total variation of those of a mechanism
    that is (epsilon, delta)-close to D', and passing from D' to D multiplies that by exp(epsilon).

    Args:
        examples: Number of examples in the data.
        sampling_rate: Probability of each to be drawn.
        limit: Rows that an update has place for.

    Returns:
        `sampling_rate` times the probability that `examples` others make `limit` draws or more, at most a billionth
        too large and never too small. Neighbouring data may have an example more, so all are others.

    Example:

    >>> from keras_paragrad.privacy import truncation_probability
    >>> truncation_probability(3, 0.5, 2)  # 0.5 * (3 + 1) / 8
    0.2500000002500002
    """
    examples = check_integer("examples", examples, example=60_000)
    rate = float(check_number("sampling_rate", sampling_rate, least=0, most=1, example=0.01))
    limit = check_integer("limit", limit, example=512)
    if limit > examples or not rate:
        return 0.0
    if rate == 1:
        return 1.0
    # Terms fall beyond the mean; after 50 deviations, and 50 more where there are few rows, none counts.
    mean = examples * rate
    last = min(examples, math.ceil(max(limit, mean) + 50 * math.sqrt(mean * (1 - rate)) + 50))
    # Below the mean, too, so that a limit that all draws pass takes no longer than another.
    first = max(limit, math.floor(mean - 50 * math.sqrt(mean * (1 - rate)) - 50))
    terms = np.exp(_log_probabilities(examples, rate, np.arange(first, last + 1, dtype=float)))
    total = float(np.sum(terms))
    if last < examples:
        # Each further term is smaller than the one before by more than this ratio.
        ratio = (examples - last) / (last + 1) * rate / (1 - rate)
        total += float(terms[-1]) * ratio / (1 - ratio)
    return min(1.0, total * _SLACK) * rate


def _log_probabilities(examples: int, rate: float, drawn: np.ndarray) -> np.ndarray:
    """Of binomial draws, without differences of large logarithms: Loader, 2000, Fast and Accurate Computation of
    Binomial Probabilities."""
    left = examples - drawn
    inside = (drawn > 0) & (left > 0)
    some, rest = np.where(inside, drawn, 1.0), np.where(inside, left, 1.0)
    errors = _stirling_error(np.array([float(examples)])) - _stirling_error(some) - _stirling_error(rest)
    deviance = _deviance(some, examples * rate) + _deviance(rest, examples * (1 - rate))
    found = errors - deviance + 0.5 * np.log(examples / (2 * math.pi * some * rest))
    none, every = examples * math.log1p(-rate), examples * math.log(rate)
    return np.where(inside, found, np.where(drawn > 0, every, none))


def _stirling_error(count: np.ndarray) -> np.ndarray:
    """log(count!) less Stirling's formula."""
    inverse = 1 / (count * count)
    series = 1 / 1188 - inverse * 691 / 360360
    for coefficient in (1 / 1680, 1 / 1260, 1 / 360, 1 / 12):
        series = coefficient - inverse * series
    exact = np.array(
        [math.lgamma(k + 1) - (k + 0.5) * math.log(k) + k - math.log(2 * math.pi) / 2 for k in range(1, 17)]
    )
    near = exact[np.minimum(count, 16).astype(int) - 1]
    return np.where(count <= 16, near, series / count)


def _deviance(count: np.ndarray, mean: float) -> np.ndarray:
    """count log(count / mean) + mean - count, where nothing cancels."""
    away = (count - mean) / (count + mean)
    direct = count * np.log(count / mean) + mean - count
    power, total = away * (count - mean), away * (count - mean)
    term = 2 * count * away
    for odd in range(3, 27, 2):
        term = term * away * away
        power = term / odd
        total = total + power
    return np.where(np.abs(away) < 0.1, total, direct)
