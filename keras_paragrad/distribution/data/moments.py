"""Mean and variance in one pass over parts of the data, in float64.

Source: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance: Analysis and Recommendations", The American
Statistician 37 (1983): the sums of squared deviations of two parts add up to that of both, with a term for the distance
of their means.
"""

from typing import NamedTuple

import numpy as np

CHUNK_BYTES = 32 * 2**20


class Moments(NamedTuple):
    """What is known of the values seen so far.

    Attributes:
        size: How many there are for each mean.
        mean: Their means.
        deviations: The sums of their squared deviations from them.
    """

    size: float
    mean: np.ndarray
    deviations: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Moments":
        """Of no values."""
        return cls(0.0, np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, values: np.ndarray, axes: tuple[int, ...]) -> "Moments":
        """Of an array, over some of its axes, the first among them. Takes memory for a part of it at a time."""
        shape = tuple(size for axis, size in enumerate(values.shape) if axis not in axes)
        total = cls.none(shape)
        rows = max(1, CHUNK_BYTES // max(1, values[:1].size * 8))
        for start in range(0, len(values), rows):
            part = values[start : start + rows].astype(np.float64)
            with np.errstate(invalid="ignore"):  # Infinite and NaN show in the mean.
                mean = part.mean(axis=axes, keepdims=True)
                deviations = np.square(part - mean).sum(axis=axes)
                total = total.merged(cls(part.size / max(1, mean.size), mean.reshape(shape), deviations))
        return total

    def merged(self, other: "Moments") -> "Moments":
        """Of the values of both."""
        size = self.size + other.size
        if not size:
            return self
        distance = other.mean - self.mean
        mean = self.mean + distance * (other.size / size)
        between = np.square(distance) * (self.size * other.size / size)
        return Moments(size, mean, self.deviations + other.deviations + between)

    def to_vector(self) -> np.ndarray:
        """All of it in one vector, float64."""
        return np.concatenate([[self.size], self.mean.ravel(), self.deviations.ravel()])

    @classmethod
    def from_vector(cls, vector: np.ndarray, shape: tuple[int, ...]) -> "Moments":
        """Back from a vector."""
        mean, deviations = np.split(vector[1:], 2)
        return cls(float(vector[0]), mean.reshape(shape), deviations.reshape(shape))
