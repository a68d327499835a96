"""A model's own `train_step`, divided into slices and over replicas."""
