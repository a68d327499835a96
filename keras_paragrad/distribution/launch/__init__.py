"""Starts a cluster of processes on this machine, and ends it. Nothing here imports TensorFlow."""
