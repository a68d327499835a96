"""Rényi differential privacy of one update, Gaussian noise on a Poisson sample, and its conversion to epsilon."""

import functools
import math
from collections.abc import Sequence

import numpy as np

from keras_paragrad.privacy.accounting.fractional import log_excess

# Those of dp-accounting and of TensorFlow Privacy, so that epsilons can be compared.
ORDERS: tuple[float, ...] = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
# With less noise the grid for fractional orders is too long, and a bound that is as good as exact takes its place.
LEAST_INTEGRATED = 0.05
# Beyond, squares don't fit into floats. Less noise and a higher rate give a bound.
_LEAST_NOISE, _MOST_NOISE, _LEAST_RATE = 1e-9, 1e50, 1e-100


def rdp(noise_multiplier: float, sampling_rate: float, orders: Sequence[float] = ORDERS) -> np.ndarray:
    """The Rényi divergence of one update, at each order, if one example is added to the data or removed from them.

    Each example is drawn with the sampling rate, on its own. The sum of what was drawn, in which each counts for a norm
    of at most 1, gets Gaussian noise. See Mironov et al., 2019, https://arxiv.org/abs/1908.10530: of both directions,
    the removal has the larger divergence. Divergences of several updates add up.

    Args:
        noise_multiplier: Standard deviation of the noise, in units of the clip norm.
        sampling_rate: Probability of each example to be drawn, from 0 to 1.
        orders: Orders above 1, integers or not.

    Returns:
        Divergences, shape `(orders,)`; infinite without noise, or next to none.

    Example:

    >>> from keras_paragrad.privacy.accounting.renyi import rdp
    >>> rdp(2.0, 1.0, [2, 8]).tolist()
    [0.25, 1.0]
    """
    alphas = np.asarray(orders, float)
    if not sampling_rate:
        return np.zeros(len(alphas))
    if noise_multiplier < _LEAST_NOISE:
        return np.full(len(alphas), math.inf)
    sigma, rate = min(noise_multiplier, _MOST_NOISE), max(sampling_rate, _LEAST_RATE)
    if rate == 1:
        return alphas / (2 * sigma**2)
    return _log_moments(sigma, rate, alphas) / (alphas - 1)


@functools.lru_cache(maxsize=64)
def rdp_of_update(noise_multiplier: float, sampling_rate: float) -> np.ndarray:
    """`rdp` at `ORDERS`, kept for the next call: an epsilon is asked for after every update."""
    found = rdp(noise_multiplier, sampling_rate)
    found.flags.writeable = False
    return found


def epsilon_of(rdp: np.ndarray, orders: Sequence[float], delta: float) -> float:
    """The smallest epsilon that divergences imply, over all orders.

    By Proposition 12 of Canonne et al., 2020, https://arxiv.org/abs/2004.00010, which is Equation 20 of Asoodeh et al.,
    2020, https://arxiv.org/abs/2001.05990. As in dp-accounting, epsilon is 0 where the total variation, which a
    divergence bounds, is below delta already.

    Args:
        rdp: Divergences of all updates together.
        orders: Their orders.
        delta: Above 0 and below 1.

    Returns:
        Epsilon, at least 0; infinite if all divergences are.
    """
    if np.any(delta**2 + np.expm1(-rdp) > 0):
        return 0.0
    alphas = np.asarray(orders, float)
    # Where the order is all but 1 the bound is not numerically stable.
    stable = alphas > 1.01
    alphas, divergences = alphas[stable], rdp[stable]
    found = divergences + np.log1p(-1 / alphas) - (math.log(delta) + np.log(alphas)) / (alphas - 1)
    return max(0.0, float(np.min(found)))


def _log_moments(sigma: float, rate: float, alphas: np.ndarray) -> np.ndarray:
    """The logarithm of E[(mixture / noise)^alpha], under noise alone."""
    whole = alphas == np.floor(alphas)
    moments = np.empty(len(alphas))
    for place in np.flatnonzero(whole):
        moments[place] = _at_integer(sigma, rate, int(alphas[place]))
    if whole.all():
        return moments
    if sigma >= LEAST_INTEGRATED:
        moments[~whole] = np.logaddexp(0, log_excess(sigma, rate, alphas[~whole]))
        return moments
    for place in np.flatnonzero(~whole):
        moments[place] = _bound_at_fraction(sigma, rate, float(alphas[place]))
    return moments


def _bound_at_fraction(sigma: float, rate: float, alpha: float) -> float:
    """The lesser of two bounds, for little noise.

    With n the order's whole part and s the rest, the ratio of densities is a + b, and (a + b)^alpha is at most
    (a + b)^n (a^s + b^s), whose terms have expectations in closed form. Where they overlap little, as with little
    noise, it is no more than that.
    """
    below, share = divmod(alpha, 1)
    n, drawn = int(below), np.arange(int(below) + 1)

    def mean_of_power(power: np.ndarray) -> np.ndarray:
        return power * math.log(rate) + power * (power - 1) / (2 * sigma**2)

    terms = [(alpha - drawn) * math.log1p(-rate) + mean_of_power(drawn)]
    terms += [(n - drawn) * math.log1p(-rate) + mean_of_power(drawn + share)]
    split = float(np.logaddexp.reduce(np.concatenate([_log_binomials(n) + each for each in terms])))
    # The logarithm of a moment is convex in the order: it lies below the chord between integers.
    first, last = _at_integer(sigma, rate, n), _at_integer(sigma, rate, n + 1)
    return min(split, (1 - share) * first + share * last)


def _at_integer(sigma: float, rate: float, alpha: int) -> float:
    """By the binomial theorem, and less the 1 that the terms without noise add up to: with all that is left positive,
    small divergences keep their digits."""
    if alpha == 1:
        return 0.0
    drawn = np.arange(2, alpha + 1)
    exponents = drawn * (drawn - 1) / (2 * sigma**2)
    terms = _log_binomials(alpha)[2:] + drawn * math.log(rate) + (alpha - drawn) * math.log1p(-rate)
    terms += exponents + np.log(-np.expm1(-exponents))
    return float(np.logaddexp(0, np.logaddexp.reduce(terms)))


@functools.cache
def _log_binomials(alpha: int) -> np.ndarray:
    """log(alpha choose k), for k from 0 to alpha."""
    logarithms = np.array([math.lgamma(each + 1) for each in range(alpha + 1)])
    return logarithms[-1] - logarithms - logarithms[::-1]
