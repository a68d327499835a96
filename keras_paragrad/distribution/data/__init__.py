"""Input pipelines: batches sharded over replicas, and inputs normalized by the whole data's mean and variance."""

from keras_paragrad.distribution.data.dataset import DistributedData, distributed_dataset
from keras_paragrad.distribution.data.epochs import FollowEpochs
from keras_paragrad.distribution.data.normalization import adapt_normalization, normalize_inputs
from keras_paragrad.distribution.data.normalization_layers import normalization_layers

__all__ = [
    "DistributedData",
    "FollowEpochs",
    "adapt_normalization",
    "distributed_dataset",
    "normalization_layers",
    "normalize_inputs",
]
