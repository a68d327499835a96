"""Derivatives of a model's outputs with respect to its inputs, row by row, in bounded memory."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.inputs.attribution import integrated_gradients
    from keras_paragrad.inputs.gradients import hessian_vector_product, input_gradients
    from keras_paragrad.inputs.jacobian import input_jacobian

__all__ = [
    "hessian_vector_product",
    "input_gradients",
    "input_jacobian",
    "integrated_gradients",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "hessian_vector_product": "gradients",
        "input_gradients": "gradients",
        "input_jacobian": "jacobian",
        "integrated_gradients": "attribution",
    },
)
