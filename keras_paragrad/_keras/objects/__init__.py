"""Keras's models, layers, optimizers and datasets: what they bring and how they are wrapped, patched and saved."""
