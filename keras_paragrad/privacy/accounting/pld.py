"""Privacy loss distributions, by dp-accounting."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from keras_paragrad.extras import require

_INTERVAL = 1e-4
LEAST_NOISE = 0.01
# dp-accounting's floats overflow beyond; less noise and a higher rate give a bound.
_MOST_NOISE, _LEAST_RATE = 1e5, 1e-12


def epsilons(parts: Iterable[tuple[float, float, int]]) -> Callable[[float], float]:
    """Epsilon as a function of delta, from the distribution of the privacy loss of all updates.

    Losses are rounded up to a grid, so epsilon is a bound, if a tight one. See Koskela et al., 2020,
    https://arxiv.org/abs/1906.03049, and Doroshenko et al., 2022, https://arxiv.org/abs/2207.04380.

    Args:
        parts: Noise multipliers and sampling rates, both above 0, and numbers of updates.

    Raises:
        MissingExtraError: dp-accounting is not installed.
    """
    require("accountant='pld'", "dp_accounting", instead="write accountant='rdp'")
    parts = [(min(noise, _MOST_NOISE), max(rate, _LEAST_RATE), count) for noise, rate, count in parts]
    least = min(noise for noise, _, _ in parts)
    # The losses of an update reach as far as its noise is small: so many of them take as much time for any noise.
    interval = _INTERVAL * max(1.0, (0.5 / least) ** 2)
    composed = [_of_update(noise, rate, interval).self_compose(count) for noise, rate, count in parts]
    total = functools.reduce(lambda one, other: one.compose(other), composed)
    return lambda delta: float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=16)
def _of_update(noise: float, rate: float, interval: float) -> Any:
    """The distribution for one update, by the relation of adding or removing an example."""
    from dp_accounting.pld import privacy_loss_distribution  # pyright: ignore[reportMissingImports]

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )
