"""Parameter servers: weights stored on servers, updated asynchronously by workers."""

from keras_paragrad.distribution.servers.parallelism import in_process_cluster, make_parameter_server_strategy, serve

__all__ = ["in_process_cluster", "make_parameter_server_strategy", "serve"]
