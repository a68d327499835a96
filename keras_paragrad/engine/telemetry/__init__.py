"""Watches gradients and updates within a step. docs/guides/profiling.md shows the callbacks that do so."""
