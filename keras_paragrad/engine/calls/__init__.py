"""Computes a call of a layer in parts of its rows. docs/guides/custom_train_step.md: "How a step is divided"."""
