"""A model on a mesh of devices: Keras's own distributions."""
