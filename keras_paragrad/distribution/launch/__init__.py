"""Starting a cluster of processes on this machine, and seeing to its end. Nothing here imports TensorFlow."""
