"""Checks that all workers train the same model in the same way, before the first step and once an epoch."""

from keras_paragrad.distribution.alike.comparison import SAME_CODE, check_alike
from keras_paragrad.distribution.alike.epochs import AgreeEachEpoch
from keras_paragrad.distribution.alike.fingerprint import fingerprint, versions
from keras_paragrad.distribution.alike.fitting import ComparedFit, given_callbacks, with_agreement
from keras_paragrad.distribution.alike.weights import check_same_weights

__all__ = [
    "SAME_CODE",
    "AgreeEachEpoch",
    "ComparedFit",
    "check_alike",
    "check_same_weights",
    "fingerprint",
    "given_callbacks",
    "versions",
    "with_agreement",
]
