"""The rules of this package, one module per kind of layer. Each registers its own: a module added here is found."""

import sys

from keras_paragrad.exports import modules_of

modules_of(sys.modules[__name__])
