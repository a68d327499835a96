"""Epsilon by privacy loss distributions: published values, and bounds that dp-accounting has for other mechanisms."""

import math

import pytest
from dp_accounting.pld import privacy_loss_distribution

from keras_paragrad.privacy import epsilon, noise_multiplier, truncation_probability, updates_within
from keras_paragrad.privacy.accounting import Updates, composed_epsilon


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
