"""Epsilon of noisy updates by dp-accounting: Rényi divergences, or privacy loss distributions."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_paragrad.arguments import check_choice, check_integer, check_number
from keras_paragrad.extras import require

# Beyond these, squares overflow. A higher rate gives an upper bound, as does less noise; tiny noise has no finite one.
_MIN_NOISE, _MAX_NOISE, _MIN_RATE = 1e-9, 1e50, 1e-100
# dp-accounting rounds sums of a thousand terms and drops terms below e^-30: the error of an update's log moments.
_ROUNDING = 1e-12
# For privacy loss distributions: below this noise, losses overflow, and epsilon is too large to mean anything.
_INTERVAL, _MIN_PLD_NOISE, _MAX_PLD_NOISE, _MIN_PLD_RATE = 1e-4, 0.01, 1e5, 1e-12


class Updates(NamedTuple):
    """Updates with the same noise and sampling.

    Attributes:
        noise_multiplier: Standard deviation of the noise, in units of the clip norm.
        sampling_rate: Probability that an example is drawn into an update.
        updates: The number of updates.
        truncation: `truncation_probability` of one update.
    """

    noise_multiplier: float
    sampling_rate: float
    updates: int
    truncation: float = 0.0


EpsilonOfDelta = Callable[[float], float]


class Accountant(NamedTuple):
    """A way to compute epsilon.

    Attributes:
        compose: Returns epsilon as a function of delta, for updates without truncation.
        description: Its name in `statement()`.
        tolerance: Relative tolerance of a calibrated noise multiplier.
        fast: Whether epsilon is cheap enough to be computed after every update rather than every epoch.
    """

    compose: Callable[[Sequence[Updates]], EpsilonOfDelta]
    description: str
    tolerance: float
    fast: bool


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

    Each update applies the Gaussian mechanism to a Poisson sample: every example is drawn with the sampling rate,
    independently of the others. For batches of shuffled data this value is too low.

    Args:
        noise_multiplier: Standard deviation of the noise, in units of the clip norm.
        sampling_rate: Probability that an example is drawn into an update: expected batch size / examples. An update
            is drawn once, even if it is computed in several physical batches.
        updates: Number of identical updates; `composed_epsilon` takes several kinds.
        delta: Above 0 and below 1; smaller than 1 / examples.
        accountant: `"rdp"` for Rényi divergences (Mironov et al., 2019, https://arxiv.org/abs/1908.10530), or
            `"pld"` for privacy loss distributions (Koskela et al., 2020, https://arxiv.org/abs/1906.03049), which are
            tighter and slower; below a noise multiplier of 0.01, and wherever it is tighter, `"pld"` returns `"rdp"`.
        truncation: `truncation_probability`, if draws are truncated to a limit.

    Returns:
        Epsilon, an upper bound; infinite without noise, or if truncation alone exceeds delta.

    Raises:
        ValueError: An argument is out of its range.
        MissingExtraError: dp-accounting is not installed.

    Example:

    >>> from keras_paragrad.privacy import epsilon
    >>> round(epsilon(1.1, 256 / 60_000, updates=60 * 60_000 // 256, delta=1e-5), 3)
    2.597
    """
    return composed_epsilon([check_updates(noise_multiplier, sampling_rate, updates, truncation)], delta, accountant)


def composed_epsilon(parts: Sequence[Updates], delta: float, accountant: str = "rdp") -> float:
    """`epsilon` of updates of several kinds, one after another."""
    delta = check_number("delta", delta, above=0, below=1, example=1e-5)
    compose = find_accountant(accountant, "epsilon").compose
    parts = [check_updates(*part) for part in parts]
    parts = [part for part in parts if part.updates and part.sampling_rate]
    if not parts:
        return 0.0
    if not all(part.noise_multiplier for part in parts):
        return math.inf
    # Delta covers the probability that the example is drawn at all.
    if sum(part.updates * part.sampling_rate for part in parts) <= delta:
        return 0.0
    return with_truncation(compose(parts), delta, sum(part.updates * part.truncation for part in parts))


def check_updates(noise_multiplier: float, sampling_rate: float, updates: int, truncation: float = 0.0) -> Updates:
    """Checks what describes updates."""
    return Updates(
        float(check_number("noise_multiplier", noise_multiplier, least=0, example=1.0)),
        float(check_number("sampling_rate", sampling_rate, least=0, most=1, example=0.01)),
        check_integer("updates", updates, least=0, example=1000),
        float(check_number("truncation", truncation, least=0, most=1, example=0.0)),
    )


def with_truncation(epsilon_of: EpsilonOfDelta, delta: float, truncated: float) -> float:
    """Finds an epsilon close to the least with `epsilon_of(delta - exp(epsilon) * truncated) <= epsilon`.

    `truncated` is the sum of the updates' truncation probabilities. Infinite if there is no such epsilon.
    """
    bound = epsilon_of(delta)
    if not truncated:
        return bound
    for _ in range(100):
        # Beyond 700, exp overflows.
        left = delta - math.exp(bound) * truncated if bound < 700 else 0.0
        if left <= 0:
            break
        needed = epsilon_of(left)
        if needed <= bound:
            return bound
        # A little more than needed, so that the iteration ends.
        bound = needed + (needed - bound) / 8 + 1e-12 * needed
    return math.inf


def compose_rdp(parts: Sequence[Updates]) -> EpsilonOfDelta:
    """Adds up the updates' Rényi divergences; returns epsilon as a function of delta."""
    from dp_accounting import rdp  # pyright: ignore[reportMissingImports]

    orders = rdp.RdpAccountant().orders.tolist()
    divergences = [float(part.updates) * rdp_of_update(part.noise_multiplier, part.sampling_rate) for part in parts]
    total = np.sum(divergences, 0).tolist()
    return lambda delta: float(rdp.compute_epsilon(orders, total, delta)[0])


@functools.lru_cache(maxsize=64)
def rdp_of_update(noise_multiplier: float, sampling_rate: float) -> np.ndarray:
    """Upper bounds of an update's Rényi divergences, at the orders of dp-accounting's `RdpAccountant`."""
    import dp_accounting as dp  # pyright: ignore[reportMissingImports]

    accountant = dp.rdp.RdpAccountant()
    if noise_multiplier < _MIN_NOISE:
        return np.full_like(accountant.orders, np.inf)
    noise, rate = min(noise_multiplier, _MAX_NOISE), max(sampling_rate, _MIN_RATE)
    with _without_convergence_warnings():
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)))
    # A small divergence may round to less than 0, for which dp-accounting would return an epsilon of 0.
    return np.maximum(accountant.rdp, 0) * (1 + _ROUNDING) + _ROUNDING / (accountant.orders - 1)


def compose_pld(parts: Sequence[Updates]) -> EpsilonOfDelta:
    """Convolves privacy loss distributions on a grid, with losses rounded up; returns epsilon as a function of delta.

    Where Rényi divergences give a smaller epsilon, it is that one.
    """
    by_rdp = compose_rdp(parts)
    least = min(part.noise_multiplier for part in parts)
    if least < _MIN_PLD_NOISE:
        return by_rdp
    # The range of losses grows as the noise shrinks; a coarser grid keeps the time constant.
    interval = _INTERVAL * max(1.0, (0.5 / least) ** 2)
    composed = [
        _pld_of_update(
            min(part.noise_multiplier, _MAX_PLD_NOISE), max(part.sampling_rate, _MIN_PLD_RATE), interval
        ).self_compose(part.updates)
        for part in parts
    ]
    total = functools.reduce(lambda one, other: one.compose(other), composed)
    # Each update rounds losses up, so for millions of updates at a tiny rate divergences are tighter.
    return lambda delta: min(float(total.get_epsilon_for_delta(delta)), by_rdp(delta))


@functools.lru_cache(maxsize=16)
def _pld_of_update(noise: float, rate: float, interval: float) -> Any:
    """The privacy loss distribution of one update."""
    from dp_accounting.pld import privacy_loss_distribution  # pyright: ignore[reportMissingImports]

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )


@contextlib.contextmanager
def _without_convergence_warnings() -> Generator[None]:
    """Hides dp-accounting's warning for each order whose series diverges; the other orders still give a bound."""

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


ACCOUNTANTS = {
    "rdp": Accountant(
        compose_rdp,
        "Rényi differential privacy (Mironov et al., 2019) with the conversion of Canonne et al. (2020), by "
        "dp-accounting",
        tolerance=1e-6,
        fast=True,
    ),
    "pld": Accountant(
        compose_pld,
        "privacy loss distributions (dp-accounting), or Rényi differential privacy where that gives less",
        tolerance=1e-3,
        fast=False,
    ),
}


def find_accountant(name: str, asked_by: str) -> Accountant:
    """Looks up an accountant by its name, after checking that dp-accounting is installed."""
    check_choice("accountant", name, tuple(ACCOUNTANTS))
    require(asked_by, "dp_accounting")
    return ACCOUNTANTS[name]
