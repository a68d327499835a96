"""The proof on real rows that parts of a batch give the outputs, gradients, losses, states and metrics of the whole."""
