"""Runs a derivative on chunks of rows: in one compiled function, on every replica."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.engine.probes.untouched import never_run, untouched
from keras_paragrad.engine.step.gradient_functions import releasing
from keras_paragrad.inputs.chunks import MOST_ROWS, bytes_in_graph, bytes_of_derivative
from keras_paragrad.inputs.function import Derivative, RowFunction
from keras_paragrad.inputs.options import DerivativeOptions
from keras_paragrad.inputs.refusal import check_assigns_nothing, check_rows, check_stateless
from keras_paragrad.inputs.rows import Chunk
from keras_paragrad.inputs.selection import Selection

Differentiate = Callable[..., Derivative]


class Execution:
    """Compiles a derivative for the first chunk, and runs it on every chunk.

    Args:
        model: The model.
        selection: The inputs that are differentiated.
        options: The arguments of the public function.
    """

    def __init__(self, model: keras.Model, selection: Selection, options: DerivativeOptions):
        self.model = model
        self.selection = selection
        self.options = options
        self.strategy = model.distribute_strategy
        self._function: Any = None

    def begin(self, chunk: Chunk, methods: Sequence[Differentiate]) -> list[np.ndarray]:
        """The results of the first chunk, by the first of `methods` whose results are sound."""
        leaves = self._distributed(chunk)
        *others, last = methods
        for method in others:
            try:
                return self._begin(method, leaves)
            except Exception:
                # If the error is not specific to this method, the last one raises it again.
                continue
        return self._begin(last, leaves)

    def run(self, chunk: Chunk) -> list[np.ndarray]:
        """The results of another chunk."""
        values, _ = self._function(self._distributed(chunk), tf.constant(False))
        return [self._gathered(value) for value in values]

    def _begin(self, method: Differentiate, leaves: Any) -> list[np.ndarray]:
        self._function = self._compiled(method, leaves)
        values, sound = self._function(leaves, tf.constant(True))
        if not self._gathered(sound).all():
            raise ValueError(
                "Forward mode and reverse mode disagree: TensorFlow can't differentiate some gradient in this model, "
                "such as that of bilinear resizing or, under XLA, of max-pooling. Write mode='reverse'."
            )
        return [self._gathered(value) for value in values]

    def _compiled(self, method: Differentiate, leaves: Any) -> Callable:
        def derivative(leaves, check):
            function, free, extra = self._row_function(leaves)
            values, sound = method(function, free, extra, check)
            pairs = zip(values, self.selection.dtypes, strict=True)
            return [tf.cast(value, dtype) for value, dtype in pairs], tf.reshape(sound, [1])

        jit = self.model.jit_compile if self.options.jit_compile == "auto" else self.options.jit_compile

        def replica(*arguments):
            # XLA compiles per replica: a single function would use one replica's variables for all.
            return (
                tf.function(derivative, jit_compile=True, autograph=False)(*arguments)
                if jit
                else derivative(*arguments)
            )

        function = tf.function(releasing(lambda *parts: self.strategy.run(replica, args=parts)), autograph=False)
        # Concrete, so that another shape raises instead of retracing.
        concrete = function.get_concrete_function(leaves, tf.constant(True))
        check_assigns_nothing(self.model, concrete.graph)
        return concrete

    def build(self, first: list[np.ndarray]) -> None:
        """Builds the model on the first row, if it is not built, and leaves its state as it is.

        Raises:
            ValueError: An output for a row would depend on other rows, or on earlier calls.
        """
        inputs = self._cast(first, slice(0, 1))[: len(self.selection.names)]
        if not self.model.built:
            with self.strategy.scope(), keras.StatelessScope():
                self.model(keras.tree.pack_sequence_as(self.selection.structure, inputs))
        check_stateless(self.model)
        specs = [tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype) for leaf in inputs]
        check_rows(self.model, keras.tree.pack_sequence_as(self.selection.structure, specs))

    def bytes_per_row(self, first: list[np.ndarray], method: Differentiate) -> float:
        """An estimated upper bound of the bytes to differentiate a row, from a trace of the forward pass."""
        rows = min(len(first[0]), MOST_ROWS)
        specs = [tf.TensorSpec((rows, *leaf.shape[1:]), leaf.dtype) for leaf in self._cast(first, slice(0, 1))]

        def forward(leaves):
            function, free, _ = self._row_function(leaves)
            with untouched(self.model, never_run()):
                return function(free)

        labels = isinstance(self.options.output, np.ndarray)
        second = len(first) > len(self.selection.names) + labels

        traced = tf.function(releasing(forward), autograph=False).get_concrete_function(specs)
        inputs = traced.inputs[: len(specs)]
        output = traced.outputs[0].shape[1:].num_elements()
        held = bytes_in_graph(traced.graph, inputs) / rows
        free = sum(first[number][0].size * 4 for number in self.selection.chosen)
        return bytes_of_derivative(method, held, free, output, second)

    def _row_function(self, leaves: Sequence[tf.Tensor]) -> tuple[RowFunction, list[tf.Tensor], list[tf.Tensor]]:
        """The row function of a chunk, its free inputs, and the additional arrays that the derivative uses."""
        count = len(self.selection.names)
        inputs, extra, labels = list(leaves[:count]), list(leaves[count:]), None
        if isinstance(self.options.output, np.ndarray):
            *extra, labels = extra
        function = RowFunction(self.model, self.selection, self.options.output, inputs, labels)
        return function, [inputs[number] for number in self.selection.chosen], extra

    def _cast(self, leaves: list[np.ndarray], rows: slice) -> list[np.ndarray]:
        """Casts leaves to the dtypes in which they are differentiated."""
        leaves = [leaf[rows] for leaf in leaves]
        for number, dtype in zip(self.selection.chosen, self.selection.dtypes, strict=True):
            leaves[number] = leaves[number].astype(dtype, copy=False)
        return leaves

    def _distributed(self, chunk: Chunk) -> Any:
        """A chunk's inputs, cast, and split equally over the replicas."""
        leaves = self._cast(chunk.leaves, slice(None))
        each = len(leaves[0]) // self.strategy.num_replicas_in_sync

        def part(context):
            start = context.replica_id_in_sync_group * each
            return [tf.constant(leaf[start : start + each]) for leaf in leaves]

        return self.strategy.experimental_distribute_values_from_function(part)

    def _gathered(self, value: Any) -> np.ndarray:
        parts = [part.numpy() for part in self.strategy.experimental_local_results(value)]
        if len(parts) < self.strategy.num_replicas_in_sync:
            raise ValueError(
                "The model's strategy has replicas in other processes, whose results can't be read here. Load the "
                "model without the strategy, and give each process its own rows."
            )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
