"""A part of a model that runs on one device, forward and backward."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_paragrad._keras.objects.layers import copy_mask, may_be_differentiated
from keras_paragrad._keras.step.leaves import dense_parts, has_gradient, rebuilt

# From the values of a part's inputs, by their places among them, to those of its outputs.
Run = Callable[..., dict[int, Any]]


class OnDevice:
    """Runs a part of a Functional model on a device, and its backward pass too.

    TensorFlow puts what a layer computes where `tf.device` says, but what a tape adds to a graph for the backward pass
    goes to the default device. So a part is differentiated by itself, on its device.

    Args:
        run: Runs the part.
        device: The device's name.
    """

    def __init__(self, run: Run, device: str):
        self.run, self.device = run, device

    def __call__(self, known: dict[int, Any], operation_fn: Callable[..., Any]) -> dict[int, Any]:
        """Runs it.

        Args:
            known: The values of its inputs, by their places among them.
            operation_fn: What Keras calls in place of an operation.

        Returns:
            The values of its outputs, by their places.
        """
        with tf.device(self.device):
            if may_be_differentiated():
                return self._differentiated(known, operation_fn)
            return self.run(known, operation_fn=operation_fn)

    def _differentiated(self, known: dict[int, Any], operation_fn: Callable[..., Any]) -> dict[int, Any]:
        leaves = list(known.values())
        tensors = [part for leaf in leaves for part in dense_parts(leaf)]
        places = [place for place, tensor in enumerate(tensors) if has_gradient(tensor)]
        found: dict[int, Any] = {}

        @tf.custom_gradient
        def placed(*arguments):
            with tf.GradientTape(persistent=True) as tape:
                # Two inputs may be the same tensor, and an output may be an input: each has a gradient of its own.
                watched = [tf.identity(each) for each in arguments]
                tape.watch(watched)
                remaining = iter(_replaced(tensors, places, watched))
                parts = [[next(remaining) for _ in dense_parts(leaf)] for leaf in leaves]
                inputs = dict(zip(known, rebuilt(leaves, parts), strict=True))
                found.update(self.run(inputs, operation_fn=operation_fn))
                for place, leaf in known.items():
                    # Attention takes masks off its inputs: other stages find these as they would without stages.
                    copy_mask(inputs[place], leaf)
                outputs = _differentiable(found)

            def gradient(*cotangents: Any, variables: Any = ()) -> Any:
                with tf.device(self.device):
                    gradients = tape.gradient(outputs, [*watched, *variables], list(cotangents))
                own, of_variables = gradients[: len(watched)], gradients[len(watched) :]
                return (own, of_variables) if variables else own

            return outputs, gradient

        returned: Any = placed(*(tensors[place] for place in places))
        passed = iter(returned)
        results = list(found.values())
        parts = [[next(passed) if has_gradient(part) else part for part in dense_parts(each)] for each in results]
        return dict(zip(found, rebuilt(results, parts), strict=True))


def _replaced(tensors: list[tf.Tensor], places: list[int], others: list[tf.Tensor]) -> list[tf.Tensor]:
    replaced = list(tensors)
    for place, other in zip(places, others, strict=True):
        replaced[place] = other
    return replaced


def _differentiable(found: dict[int, Any]) -> list[tf.Tensor]:
    return [part for leaf in found.values() for part in dense_parts(leaf) if has_gradient(part)]
