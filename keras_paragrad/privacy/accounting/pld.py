"""Privacy loss distributions, by dp-accounting."""

from collections.abc import Callable, Iterable

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
    import dp_accounting  # pyright: ignore[reportMissingImports]
    from dp_accounting.pld import PLDAccountant  # pyright: ignore[reportMissingImports]

    parts = [(min(noise, _MOST_NOISE), max(rate, _LEAST_RATE), count) for noise, rate, count in parts]
    least = min(noise for noise, _, _ in parts)
    # The losses of an update reach as far as its noise is small: so many of them take as much time for any noise.
    accountant = PLDAccountant(value_discretization_interval=_INTERVAL * max(1.0, (0.5 / least) ** 2))
    for noise, rate, count in parts:
        update = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(dp_accounting.SelfComposedDpEvent(update, count))
    return lambda delta: float(accountant.get_epsilon(delta))
