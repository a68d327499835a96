"""Gradients, weights and updates, layer by layer, while `fit` runs."""
