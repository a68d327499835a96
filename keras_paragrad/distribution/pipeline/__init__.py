"""Pipelines: a model cut into stages, each on a device of its own."""
