"""Observation of gradients and updates."""
