"""How a batch is divided, and the proof that its parts give the same gradients, states and metrics as the whole."""
