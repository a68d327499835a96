"""Runs a model on a few rows without side effects, and compares results. docs/architecture.md: "The house"."""
