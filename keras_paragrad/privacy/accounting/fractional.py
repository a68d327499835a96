"""Moments of fractional order, by a sum over a grid that converges faster than any power of its step."""

import math

import numpy as np

_HALF_WIDTH = 14.0


def log_excess(sigma: float, rate: float, alphas: np.ndarray) -> np.ndarray:
    """log(E[(1 + x)^alpha] - 1), where 1 + x is the ratio of the densities with and without an example.

    With noise z of standard deviation sigma, x = rate * (exp((2 z - 1) / (2 sigma^2)) - 1), and E[x] is 0. So this is
    the expectation of (1 + x)^alpha - 1 - alpha x, which is nowhere negative: no digits cancel, however small the
    result is. The integrand is analytic around the real line, so the trapezoidal rule converges exponentially
    (Trefethen and Weideman, 2014, https://doi.org/10.1137/130932132). The binomial series of Mironov et al. changes its
    sign at fractional orders and converges slowly; libraries that add up absolute values get a bound from it.

    Args:
        sigma: Standard deviation of the noise.
        rate: Sampling rate, between 0 and 1.
        alphas: Orders above 1.

    Returns:
        Logarithms, of the shape of `alphas`.
    """
    # The integrand's nearest singularity is pi sigma^2 off the real line.
    step = 0.4 * min(sigma, sigma**2)
    # Beside the noise itself, there is a peak near the order, where the power is largest.
    z = np.arange(-_HALF_WIDTH * sigma, float(np.max(alphas)) + _HALF_WIDTH * sigma, step)
    exponent = (2 * z - 1) / (2 * sigma**2)
    density = -((z / sigma) ** 2) / 2 + math.log(step / sigma) - math.log(2 * math.pi) / 2
    x = rate * np.expm1(np.minimum(exponent, 30.0))
    # Beyond, log1p(x) and log(x) are the logarithms of sums.
    large = exponent > 30.0
    log_ratio = np.where(large, np.logaddexp(math.log1p(-rate), math.log(rate) + exponent), np.log1p(x))
    log_x = math.log(rate) + exponent + np.log1p(-np.exp(-np.maximum(exponent, 1.0)))
    terms = [density + _log_convex(alpha, x, log_ratio, log_x, large) for alpha in alphas]
    return np.array([np.logaddexp.reduce(each) for each in terms])


def _log_convex(alpha: float, x: np.ndarray, log_ratio: np.ndarray, log_x: np.ndarray, large: np.ndarray) -> np.ndarray:
    """log((1 + x)^alpha - 1 - alpha x)."""
    small = np.abs(x) < 0.01 / alpha
    power = alpha * log_ratio
    large = large | (power > 30.0)
    # 1 + alpha x is small against the power, and neither fits into a float.
    linear = np.logaddexp(0, math.log(alpha) + np.where(large, log_x, 0.0))
    far = power + np.log1p(-np.exp(np.where(large, linear - power, -1.0)))
    near = np.where(small | large, 1.0, x)
    middle = np.expm1(np.where(small | large, 1.0, power)) - alpha * near
    # The leading terms cancel: the binomial series without them.
    series, term = np.zeros_like(x), np.where(small, x, 0.0) * alpha
    for k in range(2, 12):
        term = term * (alpha - k + 1) / k * np.where(small, x, 0.0)
        series = series + term
    tiny = np.log(np.where(small & (series > 0), series, 1.0))
    found = np.where(large, far, np.where(small, tiny, np.log(np.maximum(np.where(small, 1.0, middle), 1e-300))))
    return np.where(small & (series <= 0), -math.inf, found)
