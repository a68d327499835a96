"""Checks that all workers train the same model in the same way, before the first step and once per epoch."""

from keras_paragrad.distribution.consistency.compare import SAME_SCRIPT, check_same_training, check_same_weights
from keras_paragrad.distribution.consistency.describe import describe_training, versions
from keras_paragrad.distribution.consistency.fitting import AgreeEachEpoch, ComparedFit, shard_again, with_agreement

__all__ = [
    "SAME_SCRIPT",
    "AgreeEachEpoch",
    "ComparedFit",
    "check_same_training",
    "check_same_weights",
    "describe_training",
    "shard_again",
    "versions",
    "with_agreement",
]
