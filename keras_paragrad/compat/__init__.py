"""The seam: the only package that uses private names of Keras and TensorFlow.

Importing it checks that every private hook exists, so that an unsupported release of Keras or TensorFlow gives one
clear error instead of a traceback in the middle of training.
"""

from keras_paragrad.compat.check import check_hooks

check_hooks()
