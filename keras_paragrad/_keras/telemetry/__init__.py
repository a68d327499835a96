"""Gradients and updates, watched on their way."""
