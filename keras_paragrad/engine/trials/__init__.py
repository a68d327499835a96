"""Runs something without a trace in the model, on real rows or made-up ones, and compares results."""
