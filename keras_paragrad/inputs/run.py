"""Differentiates any number of rows, chunk by chunk, and collects the results."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.arguments import check_choice, check_flag, check_instance, check_integer
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.data import is_batched
from keras_paragrad.compat.types import FitData
from keras_paragrad.inputs.chunks import EstimateBytes, Execution, bytes_of_gradient, rows_within_budget
from keras_paragrad.inputs.function import Differentiate, check_output
from keras_paragrad.inputs.rows import Chunk, InputRows, OutFiles, make_sinks, to_arrays
from keras_paragrad.inputs.selection import Selection, Wrt
from keras_paragrad.plain_text import counted


class DerivativeOptions(NamedTuple):
    """The arguments that all derivatives with respect to inputs share; see `input_gradients`."""

    output: Any
    wrt: Wrt
    batch_size: int | None
    jit_compile: bool | str
    out: OutFiles
    stream: bool
    verbose: int

    def checked(self) -> "DerivativeOptions":
        """Returns the options, validated."""
        checked = self._replace(
            batch_size=check_integer("batch_size", self.batch_size, most=2**31 - 1, example=2048, optional=True),
            jit_compile=check_choice("jit_compile", self.jit_compile, ("auto", True, False)),
            verbose=int(check_integer("verbose", self.verbose, least=0, most=2, also=(True, False), example=1)),
            stream=check_flag("stream", self.stream),
            output=check_output(self.output),
        )
        if checked.stream and self.out is not None:
            raise ValueError(
                "`stream` and `out` can't be combined: results are yielded or written. Remove one of them."
            )
        return checked


def differentiate(
    model: keras.Model,
    x: FitData,
    methods: Sequence[Differentiate],
    options: DerivativeOptions,
    extra: FitData = None,
    estimate: EstimateBytes = bytes_of_gradient,
) -> Any:
    """Differentiates every row.

    Args:
        model: The model.
        x: The rows; see `InputRows`.
        methods: How to differentiate a chunk. The first whose result on the first chunk is valid is used for all.
        options: The arguments of the public function.
        extra: Nested arrays, cut into chunks with `x`, which the methods get too.
        estimate: Estimates the memory of a row, to choose the size of chunks.

    Returns:
        The results of all rows, nested as the inputs are, or an iterator over the results of each chunk.
    """
    check_internals("models")
    check_instance("model", model, keras.Model, "a Keras model")
    options = options.checked()
    extras = [] if extra is None else [extra]
    if isinstance(options.output, np.ndarray):
        _check_labels_fit(options.output, x)
        extras.append(options.output)
    rows = InputRows((x, *extras) if extras else x)
    structure = rows.structure[0] if extras else rows.structure
    selection = Selection.of(model, structure, rows.first, options.wrt)
    sinks = make_sinks(options.out, selection.nesting, rows.count, (x, extra))
    execution = Execution(model, selection, options.output, options.jit_compile)
    execution.build(rows.first)
    size = options.batch_size or rows_within_budget(execution.bytes_per_row(rows.first, estimate))
    chunks = rows.chunks(size, model.distribute_strategy.num_replicas_in_sync)
    results = _run_all(chunks, rows.count, execution, methods, options.verbose)
    # The first chunk runs eagerly here, so that errors are raised at the call even for streamed results.
    results = itertools.chain([next(results)], results)
    if options.stream:
        return (selection.nested(values) for values in results)
    for values in results:
        for sink, value in zip(sinks, values, strict=True):
            sink.append(value)
    return selection.nested([sink.result() for sink in sinks])


def _run_all(
    chunks: Iterator[Chunk], count: int | None, execution: Execution, methods: Sequence[Differentiate], verbose: int
) -> Iterator[list[np.ndarray]]:
    """Yields the results of each chunk, in order and without padding; `count` is the number of rows, if known."""
    bar = keras.utils.Progbar(count, verbose=verbose, unit_name="row")
    done = 0
    for chunk in chunks:
        results = execution.run(chunk) if done else execution.run_first(chunk, methods)
        yield [result[: chunk.rows] for result in results]
        done += chunk.rows
        bar.update(done, finalize=False)
    bar.target = done
    bar.update(done, finalize=True)


def _check_labels_fit(labels: np.ndarray, x: object) -> None:
    """Refuses labels that can't be matched one to one with the rows of `x`."""
    if is_batched(x):
        raise ValueError(
            f"`output` has labels, and `x` is a {type(x).__name__}, whose rows may come in any order. Pass arrays "
            "for both, or make a call per large batch, as in: for x, y in data: input_gradients(model, x, output=y)."
        )
    rows = len(to_arrays(x)[0])
    if len(labels) != rows:
        raise ValueError(
            f"`output` has {counted(len(labels), 'label')}, and `x` has {counted(rows, 'row')}. Pass one label per row."
        )
