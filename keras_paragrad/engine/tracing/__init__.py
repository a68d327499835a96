"""Traces and calls of a model without effects on it, random numbers by row, and the gradient functions of graphs."""
