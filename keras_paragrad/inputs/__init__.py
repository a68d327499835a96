"""Derivatives of a model's outputs with respect to its inputs, row by row, in bounded memory."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.inputs.attribution import integrated_gradients as integrated_gradients
    from keras_paragrad.inputs.gradients import hessian_vector_product as hessian_vector_product
    from keras_paragrad.inputs.gradients import input_gradients as input_gradients
    from keras_paragrad.inputs.jacobian import input_jacobian as input_jacobian

__getattr__, __dir__, __all__ = lazily(__name__)
