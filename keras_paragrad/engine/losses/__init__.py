"""Loss normalization, and the losses and metrics in the logs of `fit` and `evaluate`."""
