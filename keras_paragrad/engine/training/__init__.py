"""The train function: Keras's step or the model's own, in its stages."""
