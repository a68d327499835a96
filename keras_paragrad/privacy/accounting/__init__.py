"""Epsilon of updates with Poisson sampling and Gaussian noise, in NumPy alone."""
