"""The driver of all derivatives: any number of rows, in chunks, through one compiled function on every replica.

The *leaves* of a chunk are its arrays: the flattened inputs of the model, then what the derivative takes besides, such
as vectors or labels.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_choice, check_flag, check_instance, check_integer
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.data import is_batched
from keras_paragrad.compat.model import all_layers, compile_if_supported
from keras_paragrad.compat.types import FitData
from keras_paragrad.engine.tracing.effects import assigned_resources
from keras_paragrad.engine.tracing.gradient_functions import releasing
from keras_paragrad.engine.tracing.untouched import trace_untouched
from keras_paragrad.inputs.function import Differentiate, Output, RowFunction, check_output
from keras_paragrad.inputs.rows import Chunk, InputRows, collected
from keras_paragrad.inputs.selection import Selection, Wrt
from keras_paragrad.memory.cost import bytes_of_results
from keras_paragrad.per_example.mixing_layers import find_mixing_layer

# Larger chunks are no faster for small rows: a few thousand already amortize the overhead.
MOST_ROWS = 8192
BUDGET = 256 * 2**20


class DerivativeOptions(NamedTuple):
    """The arguments that all derivatives with respect to inputs share; see `input_gradients`."""

    output: Any
    wrt: Wrt
    batch_size: int | None
    jit_compile: bool | str
    stream: bool
    verbose: int

    def checked(self) -> "DerivativeOptions":
        """Returns the options, validated."""
        return self._replace(
            batch_size=check_integer("batch_size", self.batch_size, most=2**31 - 1, example=2048, optional=True),
            jit_compile=check_choice("jit_compile", self.jit_compile, ("auto", True, False)),
            verbose=int(check_integer("verbose", self.verbose, least=0, most=2, also=(True, False), example=1)),
            stream=check_flag("stream", self.stream),
            output=check_output(self.output),
        )


def differentiate(
    model: keras.Model, x: FitData, methods: Sequence[Differentiate], options: DerivativeOptions, extra: FitData = None
) -> Any:
    """Differentiates every row.

    Args:
        model: The model.
        x: The rows; see `InputRows`.
        methods: How to differentiate a chunk. From one that raises an error on, the next is used.
        options: The arguments of the public function.
        extra: Nested arrays, cut into chunks with `x`, which the methods get too.

    Returns:
        The results of all rows, nested as the inputs are, or an iterator over the results of each chunk.
    """
    check_internals("models")
    check_instance("model", model, keras.Model, "a Keras model")
    options = options.checked()
    extras = [] if extra is None else [extra]
    extras += [options.output] if isinstance(options.output, np.ndarray) else []
    if extras and is_batched(x):
        raise ValueError(
            f"`x` is a {type(x).__name__}, whose rows may come in any order. Pass arrays for both, or make a call per "
            "large batch, as in: for x, y in data: input_gradients(model, x, output=y)."
        )
    rows = InputRows((x, *extras) if extras else x)
    selection = Selection.of(model, rows.structure[0] if extras else rows.structure, rows.first, options.wrt)
    execution = Execution(model, selection, options.output, options.jit_compile, methods)
    execution.build(rows.first)
    size = options.batch_size or int(min(max(BUDGET // execution.bytes_per_row(rows.first), 1), MOST_ROWS))
    chunks = rows.chunks(size, model.distribute_strategy.num_replicas_in_sync)
    results = _run_all(chunks, rows.count, execution, options.verbose)
    # The first chunk runs eagerly here, so that errors are raised at the call even for streamed results.
    results = itertools.chain([next(results)], results)
    if options.stream:
        return (selection.nested(values) for values in results)
    return selection.nested(collected(results, rows.count))


def _run_all(
    chunks: Iterator[Chunk], count: int | None, execution: "Execution", verbose: int
) -> Iterator[list[np.ndarray]]:
    """Yields the results of each chunk, in order and without padding; `count` is the number of rows, if known."""
    bar = keras.utils.Progbar(count, verbose=verbose, unit_name="row")
    done = 0
    for chunk in chunks:
        yield [result[: chunk.rows] for result in execution.run(chunk)]
        done += chunk.rows
        bar.update(done, finalize=False)
    bar.target = done
    bar.update(done, finalize=True)


class Execution:
    """Compiles a derivative for the first chunk, and runs it on every chunk; see `differentiate`."""

    def __init__(
        self,
        model: keras.Model,
        selection: Selection,
        output: Output,
        jit_compile: bool | str,
        methods: Sequence[Differentiate],
    ):
        self._methods = methods
        self.model, self.selection, self.output = model, selection, output
        self.jit_compile = compile_if_supported(
            model, model.jit_compile if jit_compile == "auto" else bool(jit_compile)
        )
        self.strategy = model.distribute_strategy
        self._function: Any = None

    def build(self, first: list[np.ndarray]) -> None:
        """Builds the model on the first row, if it is not built; refuses a model that mixes rows."""
        inputs = self._cast(first, slice(0, 1))[: len(self.selection.names)]
        nested = functools.partial(keras.tree.pack_sequence_as, self.selection.structure)
        if not self.model.built:
            with self.strategy.scope(), keras.StatelessScope():
                self.model(nested(inputs))
        specs = nested([tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype) for leaf in inputs])
        if layer := find_mixing_layer(self.model, specs, training=False):
            raise ValueError(
                f"The output of {layer!r} for one row depends on the other rows, so a row has no derivative of its "
                "own. Don't reduce over the batch axis 0, or differentiate with a tf.GradientTape."
            )

    def run(self, chunk: Chunk) -> list[np.ndarray]:
        """The results of a chunk, one array for each source of the derivative, by the first method without an error."""
        leaves = self._distribute(chunk)
        while True:
            try:
                self._function = self._function or self._compile(self._methods[0], leaves)
                values, is_valid = self._function(leaves)
                if not self._gather(is_valid).all():
                    raise ValueError(
                        "Forward mode and reverse mode disagree: TensorFlow can't differentiate some gradient in this "
                        "model, such as bilinear resizing's or, under XLA, max-pooling's. Write mode='reverse'."
                    )
                return [self._gather(value) for value in values]
            except Exception:
                # If the error is not specific to this method, the last one raises it again.
                if len(self._methods) == 1:
                    raise
            self._methods, self._function = self._methods[1:], None

    def bytes_per_row(self, first: list[np.ndarray]) -> float:
        """An estimated upper bound of the bytes to differentiate a row, from a trace of the forward pass."""
        rows = min(len(first[0]), MOST_ROWS)
        specs = [tf.TensorSpec((rows, *leaf.shape[1:]), leaf.dtype) for leaf in self._cast(first, slice(0, 1))]
        # The entries of a row of each source, set by the trace.
        sizes: list[int] = []

        def forward(leaves: list[tf.Tensor]):
            function, _ = self._row_function(leaves)
            free = function.free_values()
            sizes[:] = [tensor.shape[1:].num_elements() or 0 for tensor in free]
            return function(free)

        traced = trace_untouched(self.model, forward, specs)
        outputs = traced.outputs[0].shape[1:].num_elements()
        # Backward passes beside the forward pass; and the result in float32, stacked, transposed and as an array.
        return 4 * (bytes_of_results(traced.graph) / rows + outputs * sum(sizes)) or 1

    def _compile(self, method: Differentiate, leaves: list[tf.Tensor]) -> Callable[..., Any]:
        """A function that differentiates a chunk on all replicas, for one shape."""

        def derivative(leaves: list[tf.Tensor]):
            function, extra = self._row_function(leaves)
            free = function.free_values()
            values, is_valid = method(function, free, extra)
            pairs = zip(values, free, strict=True)
            # With an axis, as `_gather` concatenates the replicas' results.
            return [tf.cast(value, tensor.dtype) for value, tensor in pairs], tf.reshape(is_valid, [1])

        def replica(leaves: list[tf.Tensor]):
            # XLA compiles per replica: a single function would use one replica's variables for all.
            compiled = tf.function(derivative, jit_compile=True, autograph=False) if self.jit_compile else derivative
            return compiled(leaves)

        function = tf.function(releasing(lambda *leaves: self.strategy.run(replica, args=leaves)), autograph=False)
        try:
            # Concrete, so that another shape raises instead of retracing.
            concrete = function.get_concrete_function(leaves)
        except ValueError as error:
            names = [repr(layer.name) for layer in all_layers(self.model) if isinstance(layer, keras.layers.TFSMLayer)]
            if names and "without handle data" in str(error):
                raise ValueError(
                    f"TensorFlow can't differentiate the SavedModel of {', '.join(names)} in a graph: it has a loop, "
                    "such as an LSTM's, and was differentiated eagerly before. Make the layer anew, with "
                    "keras.layers.TFSMLayer(filepath), or export its model again with unroll=True for its recurrent "
                    "layers."
                ) from error
            raise
        _check_no_assignments(self.model, concrete.graph)
        return concrete

    def _row_function(self, leaves: Sequence[tf.Tensor]) -> tuple[RowFunction, list[tf.Tensor]]:
        """The row function of a chunk, and the leaves that are neither inputs nor labels."""
        count = len(self.selection.names)
        inputs, extra, labels = list(leaves[:count]), list(leaves[count:]), None
        if isinstance(self.output, np.ndarray):
            *extra, labels = extra
        return RowFunction(self.model, self.selection, self.output, inputs, labels), extra

    def _cast(self, leaves: list[np.ndarray], rows: slice) -> list[np.ndarray]:
        """Selects rows of the leaves, and casts the inputs that are differentiated to their dtypes."""
        leaves = [leaf[rows] for leaf in leaves]
        for source in self.selection.inputs:
            leaves[source.number] = leaves[source.number].astype(source.dtype, copy=False)
        return leaves

    def _distribute(self, chunk: Chunk) -> list[tf.Tensor]:
        """A chunk's inputs, cast, and split equally over the replicas."""
        leaves = self._cast(chunk.leaves, slice(None))
        size = len(leaves[0]) // self.strategy.num_replicas_in_sync

        def replica_part(context: tf.distribute.experimental.ValueContext):
            start = context.replica_id_in_sync_group * size
            return [tf.constant(leaf[start : start + size]) for leaf in leaves]

        return self.strategy.experimental_distribute_values_from_function(replica_part)

    def _gather(self, value: tf.Tensor) -> np.ndarray:
        """Concatenates a result of all replicas along the rows, as an array."""
        parts = [part.numpy() for part in self.strategy.experimental_local_results(value)]
        if len(parts) < self.strategy.num_replicas_in_sync:
            raise ValueError(
                "The model's strategy has replicas in other processes, whose results can't be read here. Load the "
                "model without the strategy, and give each process its own rows."
            )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_no_assignments(model: keras.Model, graph: tf.Graph) -> None:
    """Refuses a model that assigns to a variable in inference mode; random seeds may advance."""
    names = {id(variable.handle): variable.name.split(":")[0] for variable in graph.variables}
    paths = {names.get(id(resource), "a table") for resource in assigned_resources(graph)}
    assigned = sorted(path for path in paths if not path.endswith("seed_generator_state"))
    if assigned:
        raise ValueError(
            f"{model.name!r} assigns to {', '.join(assigned)} when it is called with training=False, so a row's "
            "derivatives would depend on the rows before it, and later predictions would differ from earlier ones. In "
            "the layer's call(), assign only `if training:`; build the same model with stateful=False, and copy the "
            "weights: for old, new in zip(model.trainable_variables, stateless.trainable_variables): new.assign(old)."
        )
