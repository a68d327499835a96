"""From Rényi divergences to epsilon."""

import math
from collections.abc import Sequence

import numpy as np


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


def classic_epsilon_of(rdp: np.ndarray, orders: Sequence[float], delta: float) -> float:
    """As papers until 2020 state it, which is more: Proposition 3 of Mironov, 2017, https://arxiv.org/abs/1702.07476."""
    return float(np.min(rdp - math.log(delta) / (np.asarray(orders, float) - 1)))
