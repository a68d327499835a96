"""Traces and calls models without side effects, draws random numbers by row, and frees graphs' gradient functions."""
