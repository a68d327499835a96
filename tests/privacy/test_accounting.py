"""Epsilon by Rényi divergences: against sums and integrals in 50 digits, and published values."""

import decimal
import itertools
import logging
import math
import sys
from decimal import Decimal

import dp_accounting as dp
import keras
import numpy as np
import pytest

from keras_paragrad.extras import MissingExtraError
from keras_paragrad.privacy import epsilon, make_private, noise_multiplier, updates_within
from keras_paragrad.privacy.accounting import Updates, composed_epsilon, rdp_of_update
from keras_paragrad.privacy.calibration import MIN_NOISE, gradient_noise_multiplier

pytestmark = pytest.mark.fast

DIGITS = decimal.Context(prec=50)
ORDERS = dp.rdp.RdpAccountant().orders
MNIST = {"noise_multiplier": 1.1, "sampling_rate": 256 / 60_000, "updates": 60 * 60_000 // 256, "delta": 1e-5}
ABADI = {"noise_multiplier": 4.0, "sampling_rate": 0.01, "updates": 10_000, "delta": 1e-5}


def of_sum(sigma, rate, alpha):
    """The divergence at an integer order, by the binomial theorem in 50 digits."""
    with decimal.localcontext(DIGITS):
        sigma, rate = Decimal(sigma), Decimal(rate)
        total = Decimal(0)
        for k in range(alpha + 1):
            drawn = math.comb(alpha, k) * rate**k * (1 - rate) ** (alpha - k)
            total += drawn * (Decimal(k * (k - 1)) / (2 * sigma**2)).exp()
        return float(total.ln() / (alpha - 1))


def of_integral(sigma, rate, alpha):
    """The divergence at any order, by integrating the power of the ratio of densities in 50 digits."""
    with decimal.localcontext(DIGITS):
        sigma, rate, alpha = Decimal(sigma), Decimal(rate), Decimal(alpha)
        step, z, total = min(sigma, sigma**2) / 5, -14 * sigma, Decimal(0)
        while z < alpha + 14 * sigma:
            ratio = 1 - rate + rate * ((2 * z - 1) / (2 * sigma**2)).exp()
            total += (alpha * ratio.ln() - z**2 / (2 * sigma**2)).exp()
            z += step
        total *= step / (sigma * (2 * Decimal(math.pi)).sqrt())
        # Of pi, a float holds 16 digits. Without a ratio the integral is 1.
        z, one = -14 * sigma, Decimal(0)
        while z < alpha + 14 * sigma:
            one += (-(z**2) / (2 * sigma**2)).exp()
            z += step
        return float((total / (one * step / (sigma * (2 * Decimal(math.pi)).sqrt()))).ln() / (alpha - 1))


def classic_epsilon_of(divergences, delta):
    """As papers until 2020 state it, which is more: Proposition 3 of Mironov, 2017, https://arxiv.org/abs/1702.07476."""
    return float(np.min(divergences - math.log(delta) / (ORDERS - 1)))


def divergences_at(sigma, rate, orders):
    return rdp_of_update(sigma, rate)[np.searchsorted(ORDERS, np.array(orders) - 1e-6)]


@pytest.mark.parametrize("rate", [1e-8, 1e-3, 0.3, 0.99])
@pytest.mark.parametrize("sigma", [0.05, 0.7, 3.0, 50.0])
def test_integer_orders(sigma, rate):
    """Never too small, however small they are, and no larger than rounding asks for."""
    orders = np.array([2, 3, 4, 5, 11, 63])
    exact = np.array([of_sum(sigma, rate, alpha) for alpha in orders])
    bounds = divergences_at(sigma, rate, orders)
    assert (exact <= bounds).all()
    assert (bounds <= exact * (1 + 1e-10) + 2e-12 / (orders - 1)).all()


@pytest.mark.parametrize("alpha", [1.1, 2.5, 10.9])
@pytest.mark.parametrize(("sigma", "rate"), [(0.4, 1e-3), (1.0, 1e-6), (1.0, 0.05), (2.0, 0.9), (20.0, 0.01)])
def test_fractional_orders(sigma, rate, alpha):
    """Bounds: the series of dp-accounting adds up absolute values, which is more at small orders."""
    exact = of_integral(sigma, rate, alpha)
    assert exact <= divergences_at(sigma, rate, alpha) <= exact * (4 if alpha < 2 else 1.2) + 2e-12 / (alpha - 1)


def test_nothing_and_everything_drawn():
    np.testing.assert_allclose(rdp_of_update(2.0, 1.0), ORDERS / 8, rtol=1e-10)
    # Of all but everything, the divergence is all but that of everything.
    np.testing.assert_allclose(rdp_of_update(2.0, 1 - 1e-12), ORDERS / 8, rtol=1e-9)
    assert np.isinf(rdp_of_update(1e-10, 0.5)).all()
    assert epsilon(0.0, 0.5, 1, 1e-5) == math.inf
    assert epsilon(0.0, 0.0, 1, 1e-5) == epsilon(0.0, 0.5, 0, 1e-5) == 0.0


def test_draws_that_are_rarer_than_delta():
    """Of an example that is drawn at all with probability delta at most, epsilon is 0 with any noise."""
    assert epsilon(0.01, 1e-6, 10, 1e-5) == 0.0
    assert epsilon(0.01, 1e-6, 11, 1e-5) > 100


def test_orders_that_are_left_out_are_not_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        assert np.isinf(rdp_of_update.__wrapped__(0.5, 0.1)[0])
        assert not caplog.records
        dp.rdp.RdpAccountant([1.1]).compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.5)))
        assert caplog.records


@pytest.mark.not_fast
def test_extreme_arguments():
    assert epsilon(1e300, 0.1, 10, 1e-5) == 0.0
    assert epsilon(1e-300, 0.1, 10, 1e-5) == math.inf
    assert epsilon(1.0, 1e-300, 2**62, 1e-5) == 0.0
    assert 0 < epsilon(1.0, 0.1, 2**63 - 1, 1e-300) < math.inf


@pytest.mark.parametrize(("of", "today", "classic"), [(MNIST, 2.597, 3.008), (ABADI, 1.0355, 1.2586)])
def test_published_values(of, today, classic):
    """MNIST by the tutorial of TensorFlow Privacy, and the example of Abadi et al., 2016."""
    digits = len(str(today).partition(".")[2])
    assert round(epsilon(**of), digits) == today
    divergences = of["updates"] * rdp_of_update(of["noise_multiplier"], of["sampling_rate"])
    assert round(classic_epsilon_of(divergences, of["delta"]), len(str(classic).partition(".")[2])) == classic


def test_the_gaussian_mechanism():
    """One update of all examples, for which delta is known in closed form: Balle and Wang, 2018."""
    sigma, delta = 1.5, 1e-5
    found = epsilon(sigma, 1.0, 1, delta)

    def cdf(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    def exact(eps):
        return cdf(1 / (2 * sigma) - eps * sigma) - math.exp(eps) * cdf(-1 / (2 * sigma) - eps * sigma)

    assert exact(found) <= delta
    # The divergences' bound is close: with a tenth less, it would be wrong.
    assert exact(0.9 * found) > delta


def test_conversion():
    """Against Proposition 12 of Canonne et al., 2020, solved for delta."""
    divergences = 1000 * rdp_of_update(1.0, 0.01)
    found = epsilon(1.0, 0.01, 1000, 1e-5)
    logarithms = (ORDERS - 1) * (divergences - found) + (ORDERS - 1) * np.log1p(-1 / ORDERS) - np.log(ORDERS)
    assert math.exp(min(logarithms)) == pytest.approx(1e-5, rel=1e-9)
    assert found < classic_epsilon_of(divergences, 1e-5)


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("noise", "rate", "expected"), [(10.0, 0.5, 8.132), (4.0, 0.5, 26.12), (0.7, 0.1, 64.18), (0.02, 0.1, 1.3498e6)]
)
def test_epsilon_is_that_of_dp_accounting(noise, rate, expected):
    """Which is a bound: above the true epsilon, rounded down."""
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), 1000)
    found = epsilon(noise, rate, 1000, 1e-5)
    assert found == pytest.approx(dp.rdp.RdpAccountant().compose(event).get_epsilon(1e-5), rel=1e-9)
    assert found == pytest.approx(expected, rel=2e-4)
    if noise > 0.1:
        below = dp.pld.privacy_loss_distribution.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=1e-3, pessimistic_estimate=False
        ).self_compose(1000)
        assert below.get_epsilon_for_delta(1e-5) <= found


def test_less_noise_more_rows_more_updates_and_less_delta_cost_more():
    least = {"noise_multiplier": 1.0, "sampling_rate": 0.01, "updates": 100, "delta": 1e-5}
    for name, worse in {
        "noise_multiplier": [0.999, 0.7, 0.1, 0.0999, 0.0501, 0.0499, 0.02],
        "sampling_rate": [0.0101, 0.1, 0.9, 1.0],
        "updates": [101, 1000, 10**6],
        "delta": [0.99e-5, 1e-9, 1e-100],
    }.items():
        costs = [epsilon(**{**least, name: value}) for value in [least[name], *worse]]
        assert all(before < after for before, after in itertools.pairwise(costs)), (name, costs)


def test_updates_of_several_kinds_add_up():
    parts = [Updates(1.0, 0.01, 300), Updates(0.8, 0.02, 20), Updates(5.0, 1.0, 1)]
    accountant = dp.rdp.RdpAccountant()
    for noise, rate, updates, _ in parts:
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), updates)
    assert composed_epsilon(parts, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-8)
    assert composed_epsilon([Updates(1.0, 0.01, 300)] * 2, 1e-5) == epsilon(1.0, 0.01, 600, 1e-5)
    assert composed_epsilon([*parts, Updates(0.0, 0.01, 1)], 1e-5) == math.inf
    assert composed_epsilon([], 1e-5) == 0.0


@pytest.mark.not_fast
@pytest.mark.covering
@pytest.mark.parametrize("target", [0.1, 1.0, 3.0, 50.0])
@pytest.mark.parametrize(("rate", "updates"), [(0.001, 10_000), (0.05, 1), (1.0, 100)])
def test_noise_meets_its_target(target, rate, updates):
    noise = noise_multiplier(target, rate, updates, 1e-6)
    assert epsilon(noise, rate, updates, 1e-6) <= target < epsilon(noise * (1 - 2e-6), rate, updates, 1e-6)


def test_a_target_that_little_noise_meets():
    noise = noise_multiplier(1e9, 0.01, 10, 1e-5)
    assert noise == MIN_NOISE
    assert epsilon(noise, 0.01, 10, 1e-5) <= 1e9


@pytest.mark.not_fast
def test_targets_that_no_noise_meets():
    with pytest.raises(ValueError, match="Raise the limit of rows in an update"):
        noise_multiplier(1.0, 0.1, 10**5, 1e-5, truncation=1e-9)
    with pytest.raises(ValueError, match="too small for Rényi divergences"):
        noise_multiplier(1e-12, 1.0, 10, 1e-200)


@pytest.mark.parametrize("target", [0.05, 1.0, 3.0])
def test_updates_within_a_budget(target):
    allowed = updates_within(target, 1.0, 0.01, 1e-5)
    assert epsilon(1.0, 0.01, allowed, 1e-5) <= target < epsilon(1.0, 0.01, allowed + 1, 1e-5)
    assert updates_within(target, 0.0, 0.01, 1e-5) == 0
    assert updates_within(target, 1.0, 0.0, 1e-5) == 10**9
    for most in (1, 2, max(1, allowed), allowed + 1):
        assert updates_within(target, 1.0, 0.01, 1e-5, most=most) == min(most, allowed)


@pytest.mark.parametrize("count_noise", [0.6, 5.0, 1000.0])
def test_a_count_beside_gradients(count_noise):
    """Two Gaussian mechanisms together are one: the divergences add up to that of the total noise multiplier."""
    gradients = gradient_noise_multiplier(1.1, count_noise)
    assert gradients > 1.1
    together = rdp_of_update(gradients, 1.0) + rdp_of_update(2 * count_noise, 1.0)
    np.testing.assert_allclose(together, rdp_of_update(1.1, 1.0), rtol=1e-10)


def test_a_count_that_is_too_exact():
    with pytest.raises(
        ValueError, match=r"must be above half of the noise multiplier, 1\.1: .* Write count_noise=5\.5"
    ):
        gradient_noise_multiplier(1.1, 0.55)
    assert gradient_noise_multiplier(1.1, 5.5) == pytest.approx(1.1 / math.sqrt(1 - 0.01))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: epsilon(-1.0, 0.1, 1, 1e-5), "noise_multiplier"),
        (lambda: epsilon(math.inf, 0.1, 1, 1e-5), "noise_multiplier"),
        (lambda: epsilon(1.0, 1.1, 1, 1e-5), "sampling_rate"),
        (lambda: epsilon(1.0, 256, 1, 1e-5), "sampling_rate"),
        (lambda: epsilon(1.0, 0.1, 1.5, 1e-5), "updates"),
        (lambda: epsilon(1.0, 0.1, 1, 0), "delta"),
        (lambda: epsilon(1.0, 0.1, 1, 1), "delta"),
        (lambda: epsilon(1.0, 0.1, 1, 1e-5, "moments"), "accountant"),
        (lambda: epsilon(1.0, 0.1, 1, 1e-5, truncation=2), "truncation"),
        (lambda: noise_multiplier(0, 0.1, 1, 1e-5), "target_epsilon"),
        (lambda: noise_multiplier(1.0, 0, 1, 1e-5), "sampling_rate"),
        (lambda: noise_multiplier(1.0, 0.1, 0, 1e-5), "updates"),
        (lambda: noise_multiplier(1.0, 0.1, 1, math.nan), "delta"),
        (lambda: noise_multiplier(1.0, 0.1, 1, 1e-5, None), "accountant"),
        (lambda: updates_within(math.nan, 1.0, 0.1, 1e-5), "target_epsilon"),
        (lambda: updates_within(1.0, 1.0, 0.1, 1e-5, most=0), "most"),
        (lambda: gradient_noise_multiplier(0, 1.0), "noise_multiplier"),
        (lambda: gradient_noise_multiplier(1.0, None), "count_noise"),
    ],
)
def test_arguments_out_of_range(call, name):
    with pytest.raises(ValueError, match=f"`{name}` is "):
        call()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: epsilon(1.0, 0.01, 10, 1e-5), "epsilon"),
        (lambda: noise_multiplier(1.0, 0.01, 10, 1e-5), "noise_multiplier"),
        (lambda: updates_within(1.0, 1.0, 0.01, 1e-5, "pld"), "updates_within"),
        (
            lambda: make_private(
                keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
                **{"clip_norm": 1.0, "expected_batch_size": 2, "delta": 1e-5, "noise_multiplier": 1.0},
            ),
            "make_private",
        ),
    ],
)
def test_dp_accounting_is_asked_for_by_name(call, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtraError, match=rf"^{name} needs dp_accounting, .*'keras_paragrad\[privacy\]'"):
        call()
