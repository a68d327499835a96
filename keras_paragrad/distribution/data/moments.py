"""Mean and variance in one pass over parts of the data, in float64.

Source: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance: Analysis and Recommendations", The American
Statistician 37 (1983): the sum of squared deviations of the union is that of both parts, plus a term for the distance
of their means.
"""

from typing import NamedTuple

import numpy as np

CHUNK_BYTES = 32 * 2**20


class Moments(NamedTuple):
    """Running statistics of some values.

    Attributes:
        size: Number of values per mean.
        mean: Their means.
        deviations: The sums of their squared deviations from the mean.
    """

    size: float
    mean: np.ndarray
    deviations: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Moments":
        """The moments of no values."""
        return cls(0.0, np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, values: np.ndarray, axes: tuple[int, ...]) -> "Moments":
        """The moments of an array over some of its axes, including the first; computed in chunks to save memory."""
        shape = tuple(size for axis, size in enumerate(values.shape) if axis not in axes)
        total = cls.none(shape)
        rows = max(1, CHUNK_BYTES // max(1, values[:1].size * 8))
        for start in range(0, len(values), rows):
            part = values[start : start + rows].astype(np.float64)
            with np.errstate(invalid="ignore"):  # Infinity and NaN show in the mean.
                mean = part.mean(axis=axes, keepdims=True)
                deviations = np.square(part - mean).sum(axis=axes)
                total = total.merged(cls(part.size / max(1, mean.size), mean.reshape(shape), deviations))
        return total

    def merged(self, other: "Moments") -> "Moments":
        """The moments of the values of both."""
        size = self.size + other.size
        if not size:
            return self
        distance = other.mean - self.mean
        mean = self.mean + distance * (other.size / size)
        between = np.square(distance) * (self.size * other.size / size)
        return Moments(size, mean, self.deviations + other.deviations + between)

    def to_vector(self) -> np.ndarray:
        """The moments as one float64 vector."""
        return np.concatenate([[self.size], self.mean.ravel(), self.deviations.ravel()])

    @classmethod
    def from_vector(cls, vector: np.ndarray, shape: tuple[int, ...]) -> "Moments":
        """The inverse of `to_vector`."""
        mean, deviations = np.split(vector[1:], 2)
        return cls(float(vector[0]), mean.reshape(shape), deviations.reshape(shape))
