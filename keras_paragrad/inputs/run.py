"""Differentiates any number of rows, chunk by chunk, and writes the results to their sinks."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_paragrad.arguments import check_instance
from keras_paragrad.inputs.chunks import rows_within_budget
from keras_paragrad.inputs.execution import Differentiate, Execution
from keras_paragrad.inputs.labels import check_labels_fit
from keras_paragrad.inputs.options import DerivativeOptions
from keras_paragrad.inputs.results import sinks
from keras_paragrad.inputs.rows import Chunk, InputRows
from keras_paragrad.inputs.selection import Selection


def differentiate(
    model: keras.Model, x: Any, methods: Sequence[Differentiate], options: DerivativeOptions, extra: Any = None
) -> Any:
    """Takes a derivative of every row.

    Args:
        model: The model.
        x: The rows; see `InputRows`.
        methods: How to differentiate a chunk. The first whose result on the first chunk is sound is used for all.
        options: The arguments of the public function.
        extra: Nested arrays, cut into chunks with `x`, for the derivative's own use.

    Returns:
        The results of all rows, nested as the inputs are, or an iterator of those of each chunk.
    """
    check_instance("model", model, keras.Model, "a Keras model")
    options = options.checked()
    replicas = model.distribute_strategy.num_replicas_in_sync
    extras = [] if extra is None else [extra]
    if isinstance(options.output, np.ndarray):
        check_labels_fit(options.output, x)
        extras.append(options.output)
    rows = InputRows((x, *extras) if extras else x)
    structure = rows.structure[0] if extras else rows.structure
    selection = Selection.of(model, structure, rows.first, options.wrt)
    targets = sinks(options.out, selection.nesting, rows.known, (x, extra))
    execution = Execution(model, selection, options)
    execution.build(rows.first)
    size = options.batch_size or rows_within_budget(execution.bytes_per_row(rows.first, methods[-1]))
    parts = _over(rows.chunks(size, replicas), rows.known, execution, methods, options.verbose)
    # The first chunk runs eagerly here, so that errors are raised at the call even for streamed results.
    parts = itertools.chain([next(parts)], parts)
    if options.stream:
        return (selection.nested(part) for part in parts)
    for part in parts:
        for target, values in zip(targets, part, strict=True):
            target.append(values)
    return selection.nested([target.result() for target in targets])


def _over(
    chunks: Iterator[Chunk], known: int | None, execution: Execution, methods: Sequence[Differentiate], verbose: int
) -> Iterator[list[np.ndarray]]:
    """The results of each chunk, in order."""
    bar = keras.utils.Progbar(known, verbose=verbose, unit_name="row")
    done = 0
    for chunk in chunks:
        results = execution.run(chunk) if done else execution.begin(chunk, methods)
        yield [result[: chunk.rows] for result in results]
        done += chunk.rows
        bar.update(done, finalize=False)
    bar.target = done
    bar.update(done, finalize=True)
