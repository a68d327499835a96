"""Noise of gradients beside a noisy count: adaptive clipping."""

from keras_paragrad.arguments import check_number


def gradient_noise_multiplier(noise_multiplier: float, count_noise: float) -> float:
    """The noise multiplier that gradients need, if a count of examples is released with them.

    Clipping to a quantile (Andrew et al., 2021, https://arxiv.org/abs/1905.03871, Theorem 1) asks each example whether
    its norm is below the clip norm. The answers, less one half, are added up, so an example changes the sum by 1/2 at
    most, and noise of standard deviation `count_noise` is added. Both sums are one Gaussian mechanism, with the noise
    multiplier z that the accountant is given, if the gradients' is (z^-2 - (2 count_noise)^-2)^(-1/2).

    Args:
        noise_multiplier: That of both together, z, above 0.
        count_noise: Standard deviation of the count's noise, in examples; above z / 2. The paper takes expected batch
            size / 20.

    Returns:
        The noise multiplier for gradients, above `noise_multiplier`.

    Raises:
        ValueError: The count is so exact that it alone takes the whole budget.

    Example:

    >>> from keras_paragrad.privacy.accounting.adaptive import gradient_noise_multiplier
    >>> round(gradient_noise_multiplier(1.0, count_noise=5.0), 4)
    1.005
    """
    noise = float(check_number("noise_multiplier", noise_multiplier, above=0, example=1.0))
    count = float(check_number("count_noise", count_noise, above=0, example=5.0))
    share = (noise / (2 * count)) ** 2
    if share >= 1:
        raise ValueError(
            f"`count_noise` is {count:g}, and must be above half of the noise multiplier, {noise:g}: the count alone "
            f"would take more than the whole budget. Write count_noise={5 * noise:.3g}, which takes 1 % of it."
        )
    return noise / (1 - share) ** 0.5
