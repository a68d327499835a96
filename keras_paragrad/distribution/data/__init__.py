"""Input pipelines: batches sharded over replicas."""

from keras_paragrad.distribution.data.dataset import distributed_dataset, undivided_dataset
from keras_paragrad.distribution.data.distributed import DistributedData, FollowEpochs

__all__ = ["DistributedData", "FollowEpochs", "distributed_dataset", "undivided_dataset"]
