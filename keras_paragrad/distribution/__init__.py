"""One training step over many devices: what is here, what follows from it, and the step itself."""
