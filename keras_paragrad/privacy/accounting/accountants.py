"""Epsilon of updates by dp-accounting: Rényi divergences, or privacy loss distributions."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_paragrad.arguments import check_choice
from keras_paragrad.extras import require

# Beyond, squares don't fit into floats. Less noise and a higher rate give a bound; with next to no noise there is none.
_LEAST_NOISE, _MOST_NOISE, _LEAST_RATE = 1e-9, 1e50, 1e-100
# dp-accounting rounds sums of a thousand terms, and drops those below e^-30. As logarithms of moments of one update.
_ROUNDING = 1e-12
# For privacy loss distributions: with less noise, losses overflow, and no epsilon tells anything.
_INTERVAL, _LEAST_PLD_NOISE, _MOST_PLD_NOISE, _LEAST_PLD_RATE = 1e-4, 0.01, 1e5, 1e-12


class Updates(NamedTuple):
    """Updates that are alike.

    Attributes:
        noise_multiplier: Standard deviation of the noise, in units of the clip norm.
        sampling_rate: Probability of each example to be drawn into an update.
        updates: How many.
        truncation: What `truncation_probability` says of one of them.
    """

    noise_multiplier: float
    sampling_rate: float
    updates: int
    truncation: float = 0.0


EpsilonOfDelta = Callable[[float], float]


class Accountant(NamedTuple):
    """A way to compute epsilon.

    Attributes:
        compose: Returns epsilon as a function of delta, of updates with noise whose draws are not truncated.
        in_words: What `statement()` calls it.
        tolerance: Of a calibrated noise multiplier, relative.
        fast: Whether epsilon is asked for after every update, and not only after every epoch.
    """

    compose: Callable[[Sequence[Updates]], EpsilonOfDelta]
    in_words: str
    tolerance: float
    fast: bool


def compose_rdp(parts: Sequence[Updates]) -> EpsilonOfDelta:
    """By Rényi divergences, which add up."""
    from dp_accounting import rdp  # pyright: ignore[reportMissingImports]

    orders = rdp.RdpAccountant().orders.tolist()
    each = [float(part.updates) * rdp_of_update(part.noise_multiplier, part.sampling_rate) for part in parts]
    total = np.sum(each, 0).tolist()
    return lambda delta: float(rdp.compute_epsilon(orders, total, delta)[0])


@functools.lru_cache(maxsize=64)
def rdp_of_update(noise_multiplier: float, sampling_rate: float) -> np.ndarray:
    """Upper bounds of an update's Rényi divergences, at the orders of dp-accounting's `RdpAccountant`."""
    import dp_accounting as dp  # pyright: ignore[reportMissingImports]

    accountant = dp.rdp.RdpAccountant()
    if noise_multiplier < _LEAST_NOISE:
        return np.full_like(accountant.orders, np.inf)
    noise, rate = min(noise_multiplier, _MOST_NOISE), max(sampling_rate, _LEAST_RATE)
    with _without_warnings_of_orders():
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)))
    # Small divergences may round to less than 0, of which dp-accounting makes an epsilon of 0.
    return np.maximum(accountant.rdp, 0) * (1 + _ROUNDING) + _ROUNDING / (accountant.orders - 1)


def compose_pld(parts: Sequence[Updates]) -> EpsilonOfDelta:
    """By the distribution of the privacy loss, rounded up to a grid, or by Rényi divergences where these give less."""
    by_rdp = compose_rdp(parts)
    least = min(part.noise_multiplier for part in parts)
    if least < _LEAST_PLD_NOISE:
        return by_rdp
    # The losses of an update reach as far as its noise is small: so many of them take as much time for any noise.
    interval = _INTERVAL * max(1.0, (0.5 / least) ** 2)
    composed = [
        _pld_of_update(
            min(part.noise_multiplier, _MOST_PLD_NOISE), max(part.sampling_rate, _LEAST_PLD_RATE), interval
        ).self_compose(part.updates)
        for part in parts
    ]
    total = functools.reduce(lambda one, other: one.compose(other), composed)
    # Losses are rounded up in each update, so of millions at a tiny rate divergences know more.
    return lambda delta: min(float(total.get_epsilon_for_delta(delta)), by_rdp(delta))


@functools.lru_cache(maxsize=16)
def _pld_of_update(noise: float, rate: float, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution  # pyright: ignore[reportMissingImports]

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )


@contextlib.contextmanager
def _without_warnings_of_orders() -> Iterator[None]:
    """Without one for each order that is left out, as its series doesn't converge: the others give a bound, too."""

    def other(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


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
    """The accountant of a name.

    Raises:
        ValueError: There is none.
        MissingExtraError: dp-accounting is not installed.
    """
    check_choice("accountant", name, tuple(ACCOUNTANTS))
    require(asked_by, "dp_accounting")
    return ACCOUNTANTS[name]
