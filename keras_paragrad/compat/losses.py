"""Keras's matching of losses, targets and sample weights with the outputs of a model."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.private import CompileLoss
from keras_paragrad.compat.types import Array, Structure


class OutputLoss(NamedTuple):
    """A loss with its arguments, and the position of its prediction in the outputs."""

    path: tuple[str | int, ...]
    loss: keras.losses.Loss
    y_true: Any
    y_pred: Any
    sample_weight: Array | None


class LossMatching(CompileLoss):
    """Matches each loss with its arguments as `compile` and `fit` do, by name and position, without computing losses.

    Args:
        loss: A loss, or losses nested as `compile` takes them.
        output_names: The model's `output_names`, if it has them.
    """

    def __init__(self, loss: Any, output_names: list[str] | None):
        check_internals("models")
        super().__init__(loss, output_names=output_names)
        self._stated, self._matched = loss, list[Any]()

    @property
    def metrics(self) -> list[Any]:
        """A placeholder for each loss's tracker: nothing is tracked."""
        return [None] * len(self._flat_losses or [])

    def build(self, y_true: Structure, y_pred: Structure) -> None:
        """Flattens the losses as Keras does, and puts `_record` in the place of each."""
        # Keras creates variables that track several losses. A separate graph keeps them out of a running trace.
        with tf.Graph().as_default():
            super().build(y_true, y_pred)
        self._flat_losses = [
            flat._replace(loss=functools.partial(self._record, flat.path, flat.loss)) for flat in self._flat_losses
        ]

    def match(self, y: Structure, y_pred: Structure, sample_weight: Structure = None) -> list[OutputLoss]:
        """The arguments of each loss, for targets and weights as `fit` takes them, and a model's outputs.

        Raises:
            ValueError: They can't be matched. The message says how each is nested.
        """
        try:
            matched = self._match(y, y_pred)
            if not keras.tree.is_nested(sample_weight):
                return [output_loss._replace(sample_weight=sample_weight) for output_loss in matched]
            # Nested sample weights are matched like targets.
            weights = self._match(sample_weight, y_pred, optional=True)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._refusal(y, y_pred, sample_weight, error) from error
        return [
            output_loss._replace(sample_weight=other.y_true)
            for output_loss, other in zip(matched, weights, strict=True)
        ]

    def _match(self, y: Structure, y_pred: Structure, *, optional: bool = False) -> list[OutputLoss]:
        """Lets Keras call each loss with its arguments, and returns them; targets may be missing if `optional`."""
        self._matched.clear()
        self(self._by_name(y, y_pred), y_pred)
        for output_loss in self._matched:
            for leaf in keras.tree.flatten(output_loss.y_true):
                if not (tf.is_tensor(leaf) or (leaf is None and optional)):
                    raise KeyError(f"The output {'/'.join(map(str, output_loss.path)) or 0} has a loss and no target")
        if not self._matched:
            raise ValueError("No output has a loss")
        return list(self._matched)

    def _by_name(self, y: Structure, y_pred: Structure) -> Structure:
        """Orders targets given by name like the outputs, with `None` for missing ones, as Keras matches by position."""
        names = self.output_names
        if not isinstance(y, Mapping) or isinstance(y_pred, Mapping) or not names:
            return y
        if unknown := [key for key in y if key not in names]:
            raise KeyError(f"{unknown} are not among the outputs {names}")
        values = [y.get(name) for name in names]
        return keras.tree.pack_sequence_as(y_pred, values)

    def _record(
        self,
        path: tuple[str | int, ...],
        loss: keras.losses.Loss,
        y_true: Structure,
        y_pred: Structure,
        sample_weight: Array | None = None,
    ) -> tf.Tensor:
        """Takes the place of a loss: records its arguments, and returns 0."""
        self._matched.append(OutputLoss(path, loss, y_true, y_pred, sample_weight))
        return tf.zeros([])

    def _refusal(self, y: Structure, y_pred: Structure, sample_weight: Structure, error: Exception) -> ValueError:
        names = f", with the names {self.output_names}" if self.output_names else ""
        parts = {"`loss`": self._stated, "`y`": y}
        parts |= {"`sample_weight`": sample_weight} if keras.tree.is_nested(sample_weight) else {}
        nested = ", ".join(f"{name} {_nesting(part)}" for name, part in parts.items())
        reason = f" {error.args[0]}.".replace("..", ".") if isinstance(error, (KeyError, ValueError)) else ""
        return ValueError(
            f"The model's outputs are nested as {_nesting(y_pred)}{names}, and these don't fit them: {nested}. Nest "
            "each as the outputs are, or write a dictionary from the names of the outputs, with None for an output "
            f"without a loss.{reason}"
        )


def _nesting(nested: Structure) -> str:
    """How a structure is nested, with `*` for each leaf."""
    if isinstance(nested, Mapping):
        return f"{{{', '.join(f'{key!r}: {_nesting(value)}' for key, value in nested.items())}}}"
    if isinstance(nested, (list, tuple)):
        return f"[{', '.join(map(_nesting, nested))}]"
    return "None" if nested is None else "*"
