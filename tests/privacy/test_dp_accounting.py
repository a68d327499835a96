"""Our accountant and dp-accounting's, which the extra `privacy` installs."""

import math

import numpy as np
import pytest

from keras_paragrad.privacy import epsilon, noise_multiplier, truncation_probability, updates_within
from keras_paragrad.privacy.accounting.composition import Updates, composed_epsilon
from keras_paragrad.privacy.accounting.renyi import ORDERS, rdp

dp = pytest.importorskip(
    "dp_accounting", reason="dp-accounting is not installed: pip install 'keras_paragrad[privacy]'"
)
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant as theirs


def of_theirs(noise, rate, orders):
    return np.array(theirs._compute_rdp_poisson_subsampled_gaussian(rate, noise, orders))


@pytest.mark.parametrize("rate", [1e-3, 0.01, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("noise", [0.3, 0.7, 1.1, 4.0, 10.0])
def test_divergences(noise, rate):
    """At integer orders they are the same, but for digits that theirs, logarithms of sums with a 1, lack of small ones.

    At fractional orders theirs is a bound, and ours no more.
    """
    whole = [order for order in ORDERS if order == int(order)]
    ours, expected = rdp(noise, rate, whole), of_theirs(noise, rate, whole)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-13)
    fractional = [order for order in ORDERS if order not in whole]
    ours, bound = rdp(noise, rate, fractional), of_theirs(noise, rate, fractional)
    assert (ours <= bound * (1 + 1e-9) + 1e-13).all()
    # Where their series ends before its terms change their sign, it is exact.
    exact = [place for place, order in enumerate(fractional) if order > 7 and noise <= 0.3]
    np.testing.assert_allclose(ours[exact], bound[exact], rtol=1e-9)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
@pytest.mark.parametrize(
    ("noise", "rate", "updates"), [(1.1, 256 / 60_000, 14_062), (4.0, 0.01, 10_000), (0.7, 0.05, 9)]
)
def test_epsilon(noise, rate, updates, delta):
    accountant = theirs.RdpAccountant()
    accountant.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), updates))
    expected = accountant.get_epsilon(delta)
    found = epsilon(noise, rate, updates, delta)
    # Theirs may be at a fractional order, and larger: on MNIST, by a millionth.
    assert expected * (1 - 1e-2) <= found <= expected * (1 + 1e-9)
    if delta == 1e-5 and updates > 9:
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("noise", "rate", "updates", "ours", "by_series"),
    [(10.0, 0.5, 1000, 8.119, 8.132), (4.0, 0.5, 1000, 25.97, 26.12), (0.7, 0.1, 1000, 58.07, 64.18)],
)
def test_large_epsilons_take_fractional_orders(noise, rate, updates, ours, by_series):
    """There theirs is the looser bound, and ours is one still: above the true epsilon, rounded down."""
    accountant = theirs.RdpAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), updates)
    found = epsilon(noise, rate, updates, 1e-5)
    below = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-3, pessimistic_estimate=False
    ).self_compose(updates)
    assert below.get_epsilon_for_delta(1e-5) <= found
    assert found == pytest.approx(ours, rel=2e-4)
    assert accountant.get_epsilon(1e-5) == pytest.approx(by_series, rel=2e-4)


@pytest.mark.parametrize("noise", [0.1001, 0.0999, 0.08, 0.0501, 0.0499, 0.02])
def test_epsilon_of_little_noise(noise):
    accountant = theirs.RdpAccountant()
    accountant.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(noise)), 100))
    assert epsilon(noise, 0.1, 100, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize(("noise", "rate", "less"), [(5.0, 1e-6, True), (20.0, 1e-4, False)])
def test_privacy_loss_distributions_never_cost_more(noise, rate, less):
    """Losses are rounded up once for each update, so of many at a tiny rate, divergences know more."""
    by_rdp, by_pld = (epsilon(noise, rate, 10**5, 1e-8, accountant) for accountant in ("rdp", "pld"))
    assert by_pld < by_rdp if less else by_pld == by_rdp


@pytest.mark.parametrize(
    ("noise", "rate", "updates", "published"),
    [(1.1, 256 / 60_000, 14_062, 2.382), (4.0, 0.01, 10_000, 0.947)],
)
def test_published_values_of_privacy_loss_distributions(noise, rate, updates, published):
    found = epsilon(noise, rate, updates, 1e-5, "pld")
    assert round(found, 3) == published
    assert found < epsilon(noise, rate, updates, 1e-5)


@pytest.mark.slow(10)
def test_budgets_of_privacy_loss_distributions():
    rate, delta = 0.01, 1e-5
    # The less noise there is, the longer it takes.
    noise = noise_multiplier(0.1, rate, 20, delta, "pld")
    assert epsilon(noise, rate, 20, delta, "pld") <= 0.1 < epsilon(noise * (1 - 2e-3), rate, 20, delta, "pld")
    assert noise < noise_multiplier(0.1, rate, 20, delta)
    allowed = updates_within(0.5, 2.0, rate, delta, "pld", most=10_000)
    assert 0 < allowed < 10_000
    assert epsilon(2.0, rate, allowed, delta, "pld") <= 0.5 < epsilon(2.0, rate, allowed + 1, delta, "pld")


def test_several_kinds_of_updates_in_privacy_loss_distributions():
    first, last = Updates(2.0, 0.01, 25), Updates(4.0, 0.01, 25)
    least, most = (epsilon(noise, 0.01, 50, 1e-5, "pld") for noise in (4.0, 2.0))
    assert composed_epsilon([first] * 2, 1e-5, "pld") == pytest.approx(most, rel=1e-3)
    assert least < composed_epsilon([first, last], 1e-5, "pld") < most


@pytest.mark.parametrize(("noise", "rate"), [(1e200, 0.5), (1.0, 1e-30), (0.01, 0.5), (1e-6, 0.1), (0.0, 0.1)])
def test_extreme_arguments(noise, rate):
    """A bound is all that such epsilons are."""
    found, other = (epsilon(noise, rate, 3, 1e-5, accountant) for accountant in ("pld", "rdp"))
    assert 0 <= found <= max(1e-3, other * 1.01)
    assert (found == math.inf) == (noise == 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [60, 75, 100])
def test_truncation_costs_what_dp_accounting_says_or_more(limit):
    """Its privacy loss of truncated Poisson sampling is exact for neighbours of which one has a row of zeros."""
    examples, rate, noise, delta = 1000, 0.05, 1.0, 1e-5
    truncation = truncation_probability(examples, rate, limit)
    exact = privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        examples, rate, limit, noise, value_discretization_interval=1e-3
    ).get_epsilon_for_delta(delta)
    found = epsilon(noise, rate, 1, delta, "pld", truncation=truncation)
    assert found >= exact * (1 - 1e-3)
    assert limit < 100 or found == pytest.approx(epsilon(noise, rate, 1, delta, "pld"), rel=1e-3)


@pytest.mark.long
def test_several_draws_are_not_one_at_the_sum_of_their_rates():
    """In eight draws an example may be up to eight times: why an update is drawn once."""
    chances = [math.comb(8, times) * 0.05**times * 0.95 ** (8 - times) for times in range(9)]
    accumulate = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        1.0, list(range(9)), chances, value_discretization_interval=1e-2
    )
    assert round(epsilon(1.0, 8 * 0.05, 100, 1e-5, "pld"), 1) == 31.0
    assert accumulate.self_compose(100).get_epsilon_for_delta(1e-5) == pytest.approx(42.0, abs=0.1)
