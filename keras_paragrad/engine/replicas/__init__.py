"""Evaluates and predicts on replicas, and prepares a model for them. docs/guides/distribution.md explains how."""
