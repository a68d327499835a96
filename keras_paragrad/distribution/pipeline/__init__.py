"""Pipelines: a model cut into stages, each on another device."""
