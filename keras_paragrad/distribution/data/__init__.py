"""Input pipelines: batches sharded over replicas, and inputs normalized by the whole data's mean and variance."""

from keras_paragrad.distribution.data.dataset import distributed_dataset, undivided_dataset
from keras_paragrad.distribution.data.distributed import DistributedData, FollowEpochs
from keras_paragrad.distribution.data.input_normalization import (
    adapt_normalization,
    normalization_layers,
    normalize_inputs,
)

__all__ = [
    "DistributedData",
    "FollowEpochs",
    "adapt_normalization",
    "distributed_dataset",
    "normalization_layers",
    "normalize_inputs",
    "undivided_dataset",
]
