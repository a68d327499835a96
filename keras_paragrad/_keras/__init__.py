"""The seam: the only package that names what Keras and TensorFlow keep private.

Importing it checks that every private hook is where it was, so that an unsupported release of Keras or TensorFlow is
met by one clear sentence and not by a traceback from the middle of training.
"""

from keras_paragrad._keras.hooks.check import check_hooks

check_hooks()
