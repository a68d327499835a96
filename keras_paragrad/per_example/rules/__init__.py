"""The built-in rules, one module per kind of layer."""

from keras_paragrad.per_example.rules import (  # noqa: F401  (each registers its own)
    convolution,
    convolution_transpose,
    dense,
    einsum,
    embedding,
    generic,
    normalization,
    prelu,
    reversible,
    separable,
)
