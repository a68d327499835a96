"""The seam: the only package that says where private names of Keras and TensorFlow are.

Importing it looks at Keras's backend alone. A component looks for the private names that it uses when it is made, so
that an unsupported release of Keras or TensorFlow gives one clear error instead of a traceback in the middle of
training, and components that don't use what is missing work.
"""

from keras_paragrad.compat.check import check_backend

check_backend()
