"""Divides the calls of layers in a step that runs whole: in slices, on replicas, or in slices on replicas."""
