"""A custom `train_step`, divided into slices and over replicas."""
