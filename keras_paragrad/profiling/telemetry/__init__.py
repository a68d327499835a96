"""Per-layer statistics of gradients, weights and updates during `fit`."""
