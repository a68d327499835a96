"""Differentiates any number of rows, chunk by chunk, and writes the results to their sinks."""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import keras
import numpy as np

from keras_paragrad.arguments import check_instance, check_path, refusal
from keras_paragrad.inputs.chunks import rows_within_budget
from keras_paragrad.inputs.execution import Differentiate, Execution
from keras_paragrad.inputs.labels import check_labels_fit
from keras_paragrad.inputs.options import DerivativeOptions
from keras_paragrad.inputs.rows import Chunk, InputRows
from keras_paragrad.inputs.selection import Selection


class GrowingArray:
    """An array that rows are appended to, without a second full copy at the end.

    Args:
        rows: How many rows there will be, or `None` if that isn't known.
    """

    def __init__(self, rows: int | None):
        self._expected = rows
        self._rows = 0
        self._array: np.ndarray | None = None

    def append(self, part: np.ndarray) -> None:
        """Adds some rows."""
        if self._array is None:
            self._array = np.empty((self._expected or len(part), *part.shape[1:]), part.dtype)
        end = self._rows + len(part)
        if end > len(self._array):
            # Grows in small steps to waste little memory: the system remaps a large array without copying it.
            self._array.resize((end + end // 32, *part.shape[1:]), refcheck=False)
        self._array[self._rows : end] = part
        self._rows = end

    def result(self) -> np.ndarray:
        """The array of all rows."""
        assert self._array is not None, "a result has at least one row"
        if len(self._array) > self._rows:
            self._array.resize((self._rows, *self._array.shape[1:]), refcheck=False)
        return self._array


class NpyFile:
    """A `.npy` file that rows are appended to. It is readable at any time, and holds the rows written so far.

    Args:
        path: The file. An existing file is replaced by a new one with the first rows, so that arrays mapped from the
            old one stay intact.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._rows = 0

    def append(self, part: np.ndarray) -> None:
        """Adds some rows."""
        if self._rows:
            with self._path.open("r+b") as file:
                self._add(file, part)
            return
        beginning = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with beginning.open("xb") as file:
            try:
                self._add(file, part)
                file.flush()
                beginning.replace(self._path)
            except BaseException:
                beginning.unlink(missing_ok=True)
                raise

    def _add(self, file: BinaryIO, part: np.ndarray) -> None:
        self._write_header(file, part)
        file.seek(0, os.SEEK_END)
        file.write(np.ascontiguousarray(part).data)
        self._rows += len(part)
        self._write_header(file, part)

    def _write_header(self, file: BinaryIO, part: np.ndarray) -> None:
        # NumPy pads the header for any number of rows, so its length never changes.
        shape = (self._rows, *part.shape[1:])
        header = {"descr": np.lib.format.dtype_to_descr(part.dtype), "fortran_order": False, "shape": shape}
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header)

    def result(self) -> np.ndarray:
        """All rows, memory-mapped read-only."""
        return np.load(self._path, mmap_mode="r")


def sinks(out: Any, nesting: Any, rows: int | None, x: Any) -> list[GrowingArray] | list[NpyFile]:
    """A sink for each result: files if `out` names them in the same nesting, otherwise memory.

    Files that the rows `x` are mapped from, and one for several results, are refused.
    """
    count = len(keras.tree.flatten(nesting))
    if out is None:
        return [GrowingArray(rows) for _ in range(count)]
    try:
        keras.tree.assert_same_structure(out, nesting)
        paths = [check_path("out", path) for path in keras.tree.flatten(out)]
    except Exception:  # whatever Keras raises for another nesting
        example = keras.tree.map_structure(lambda number: f"{number}.npy", nesting)
        raise refusal("out", out, "a file for each result, nested as they are", repr(example)) from None
    files = [os.path.realpath(path) for path in paths]
    if inputs := set(files) & _mapped_files(x):
        raise ValueError(f"`out` names {inputs.pop()}, which the rows are read from. Name another file.")
    if twice := {file for file in files if files.count(file) > 1}:
        raise ValueError(f"`out` names {twice.pop()} twice. Name a separate file for each result.")
    return [NpyFile(path) for path in paths]


def _mapped_files(x: Any) -> set[str]:
    found = set()
    for array in keras.tree.flatten(x):
        # Slices and plain views of a mapped array have it as their base.
        while isinstance(array, np.ndarray):
            if isinstance(array, np.memmap) and array.filename is not None:
                found.add(os.path.realpath(array.filename))
            array = array.base
    return found


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
