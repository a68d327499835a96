"""Derivatives of a model's outputs with respect to its inputs, row by row, in bounded memory."""
