"""Parameter servers: weights stored on servers, updated asynchronously by workers."""

from keras_paragrad.distribution.servers.parallelism import (
    in_process_cluster,
    make_parameter_server_strategy,
    serve,
    serve_if_asked,
)
from keras_paragrad.distribution.servers.preparation import ServerPreparation, prepare_for_servers

__all__ = [
    "ServerPreparation",
    "in_process_cluster",
    "make_parameter_server_strategy",
    "prepare_for_servers",
    "serve",
    "serve_if_asked",
]
