"""Draws that are cut at a limit: their probability in 60 digits, and the guarantee by enumerating all draws."""

import decimal
import itertools
import math
from decimal import Decimal

import numpy as np
import pytest

from keras_paragrad.privacy import epsilon, truncation_probability
from keras_paragrad.privacy.accounting import with_truncation

pytestmark = pytest.mark.fast


def tail(examples, rate, limit):
    """The probability of `limit` draws or more."""
    with decimal.localcontext(decimal.Context(prec=60)):
        rate = Decimal(rate)
        total = term = math.comb(examples, limit) * rate**limit * (1 - rate) ** (examples - limit)
        for drawn in range(limit, examples):
            term *= Decimal(examples - drawn) / (drawn + 1) * rate / (1 - rate)
            total += term
            if term < total * Decimal("1e-40") and drawn > examples * rate:
                break
        return total


@pytest.mark.parametrize(
    ("examples", "rate", "limit"),
    [
        (1, 0.3, 1),
        (3, 0.5, 2),
        (40, 0.1, 1),
        (40, 0.1, 40),
        (40, 0.99, 39),
        (1000, 0.001, 17),
        (60_000, 256 / 60_000, 100),
        (60_000, 256 / 60_000, 256),
        (60_000, 256 / 60_000, 384),
        (60_000, 256 / 60_000, 512),
        (10**7, 1e-4, 1300),
        (82_357_798, 1.5148488905645528e-07, 8),
    ],
)
def test_probability(examples, rate, limit):
    found = Decimal(truncation_probability(examples, rate, limit))
    expected = tail(examples, rate, limit) * Decimal(rate)
    # Above, but for the rounding of a product whose other factor is the rate.
    assert -Decimal("1e-15") <= found / expected - 1 <= Decimal("2e-6")


def test_limits_that_no_draw_and_that_every_draw_passes():
    assert truncation_probability(10, 0.5, 11) == 0.0
    assert truncation_probability(10, 0.0, 1) == 0.0
    assert truncation_probability(10, 1.0, 10) == 1.0
    assert truncation_probability(10**9, 0.5, 10) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "name"), [((0, 0.1, 1), "examples"), ((10, 2, 1), "sampling_rate"), ((10, 0.1, 0), "limit")]
)
def test_arguments_out_of_range(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}` is "):
        truncation_probability(*arguments)


def density(rows, rate, limit, noise, grid, *, at_random):
    """The density of one update's sum: all draws, and all ways to keep `limit` of their rows."""
    total = np.zeros_like(grid)
    for drawn in itertools.product([False, True], repeat=len(rows)):
        chance = math.prod(rate if each else 1 - rate for each in drawn)
        held = [row for row, each in zip(rows, drawn, strict=True) if each]
        kept = list(itertools.combinations(held, min(limit, len(held)))) if at_random else [held[:limit]]
        for each in kept:
            total += chance / len(kept) * np.exp(-(((grid - sum(each)) / noise) ** 2) / 2)
    return total / (noise * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("at_random", [True, False])
@pytest.mark.parametrize(("rate", "limit"), [(0.3, 2), (0.1, 2), (0.5, 4), (0.5, 1)])
def test_the_guarantee_holds_for_every_draw(rate, limit, at_random):
    """One update of data in which one example, of norm 1, pulls against all others: a row dropped for it is felt twice.

    Its delta for an epsilon, in both directions, against that of Poisson sampling and exp(epsilon) times the
    probability.
    """
    noise, grid = 1.0, np.linspace(-20, 20, 8001)
    others = [-1.0] * 5
    without = density(others, rate, limit, noise, grid, at_random=at_random)
    with_one = density([1.0, *others], rate, limit, noise, grid, at_random=at_random)
    alone = density([], rate, 1, noise, grid, at_random=True)
    drawn = density([1.0], rate, 1, noise, grid, at_random=True)

    def delta(one, other, eps):
        return max(
            float(np.sum(np.maximum(p - math.exp(eps) * q, 0.0)) * (grid[1] - grid[0]))
            for p, q in ((one, other), (other, one))
        )

    truncation = truncation_probability(len(others), rate, limit)
    needed = []
    for eps in (0.01, 0.1, 0.3, 0.7, 1.0, 1.5):
        exact, poisson = delta(with_one, without, eps), delta(drawn, alone, eps)
        assert exact <= poisson + math.exp(eps) * truncation + 1e-12
        needed.append(exact - poisson)
        # The same through `epsilon`: what it says for a delta, the update keeps.
        found = epsilon(noise, rate, 1, 0.3, truncation=truncation)
        assert found == math.inf or delta(with_one, without, found) <= 0.3
    # Where draws overflow often, the guarantee would be wrong without that term.
    assert max(needed) > 1e-3 or (rate, limit) != (0.5, 1)


@pytest.mark.parametrize("truncated", [1e-9, 1e-7, 3e-7])
def test_epsilon_and_what_truncation_takes_of_delta_agree(truncated):
    def spent(delta):
        return epsilon(1.0, 0.01, 1000, delta)

    found = with_truncation(spent, 1e-5, truncated)
    assert spent(1e-5 - math.exp(found) * truncated) <= found
    # Of all epsilons for which that is so it is the least, all but a hundredth.
    less = found * 0.99
    assert spent(1e-5 - math.exp(less) * truncated) > less
    assert found == epsilon(1.0, 0.01, 1000, 1e-5, truncation=truncated / 1000)


def test_truncation_that_takes_all_of_delta():
    assert epsilon(1.0, 0.01, 1000, 1e-5, truncation=1e-8) == math.inf
    assert epsilon(1e6, 1.0, 1, 1e-5, truncation=1.0) == math.inf
