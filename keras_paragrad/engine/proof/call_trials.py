"""Tries a step on a few real rows, without an update.

`CallTrials` finds which calls of layers in the step compute each row by itself. `WindowProof` finds whether the step's
micro-batches weigh what is stated.

for each outermost call of a layer whose class isn't known to compute row by row:
    compute the call whole, and in two parts
    if outputs, gradients or states differ: enter the layer, and compare the calls within it
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import WeightScope, has_gradient
from keras_paragrad.compat.model import all_layers, all_variables, is_seed, percent, train_step_of
from keras_paragrad.compat.types import Batch, Gradients, Structure
from keras_paragrad.compat.workers import gather, worker_strategy
from keras_paragrad.engine.batches.replica_batch import rows_at
from keras_paragrad.engine.calls.divided import Result
from keras_paragrad.engine.calls.intercept import intercepting
from keras_paragrad.engine.calls.layer_call import LayerCall
from keras_paragrad.engine.losses.divisors import Weighting
from keras_paragrad.engine.losses.known_classes import computes_rows_independently
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.proof.loss_proof import perturb
from keras_paragrad.engine.proof.model_proof import aggregate
from keras_paragrad.engine.proof.pure_function import PureFunction, State, random_numbers_of_part, value_of
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.engine.trials.trial import (
    OUTPUT,
    OUTPUT_OF_PART,
    Tolerance,
    among_others,
    even_parts,
    few_rows,
    gather_rows,
    largest_error,
    row_count,
    run_trial,
    sum_with_factors,
    take_rows,
    uneven_parts,
    unexplained_error,
    with_ends_of,
)

# The most trials. After each, more layers are entered.
_MOST_TRIALS = 50


class CallTrials:
    """Tries on a few rows which calls of layers in a step can be divided. `data` are this process's rows, if any."""

    def __init__(self, model: keras.Model, step: Callable[[Batch], Any], data: Batch | None):
        self.model, self.step, self._rows = model, step, None
        if data is not None and row_count(data) > 1:
            self._rows = few_rows(data)
        self._entered: dict[int, str] = {}
        self._trial: _Trial | None = None

    def find(self) -> dict[int, str]:
        """Tries layers that aren't known. Returns those whose calls can't, or couldn't, be divided: ids and reasons."""
        untried = untried_layers(self.model)
        if not untried:
            return {}
        found: dict[int, str] = {}
        if self._rows is not None:
            question = "which calls of layers can be divided"
            found = run_trial(lambda _: self._try_calls(), 0, otherwise=untried, question=question)
        # Each worker has tried other rows, and all have to trace the same step.
        tried = self._rows is not None
        flags = gather(worker_strategy(self.model), [int(tried), *(int(layer in found) for layer in untried)])
        any_tried, *mixing = np.any(flags, 0)
        if not any_tried:
            return untried
        elsewhere = "its rows depend on each other, on rows of another worker"
        return {layer: found.get(layer, elsewhere) for layer, flag in zip(untried, mixing, strict=True) if flag}

    def try_alone(self) -> dict[int, str]:
        """As `find`, but on this worker's rows only, for an error. Nothing is found if they can't be tried."""
        return run_trial(lambda _: self._try_calls(), 0, otherwise={}, question=None) if self._rows is not None else {}

    def _try_calls(self) -> dict[int, str]:
        for _ in range(_MOST_TRIALS):
            # The trial is traced again only when more layers are entered.
            trial = self._trial = self._trial or _Trial(self.model, self.step, row_count(self._rows), self._entered)
            trial.renew()
            errors, _ = trial(self._rows)
            found = {
                id(layer): f"its {what} for some rows depend on other rows"
                for (layer, what, tolerance), error in zip(trial.compared, errors, strict=True)
                if not float(error) <= tolerance.of(trial.half_precision)
            }
            if not found:
                break
            self._entered, self._trial = {**self._entered, **found}, None
        return self._entered


def innermost(model: keras.Model, entered: Mapping[int, str]) -> list[str]:
    """The names of the layers in `entered` that contain no other layer in `entered`."""
    layers = [layer for layer in (model, *all_layers(model)) if id(layer) in entered]
    return [
        layer.name
        for layer in layers
        if not any(id(inner) in entered for inner in all_layers(layer) if inner is not layer)
    ]


def untried_layers(model: keras.Model) -> dict[int, str]:
    """The layers that aren't known to compute row by row, by id. Untried, they are entered."""
    layers = [layer for layer in (model, *all_layers(model)) if not _is_known(layer)]
    return {id(layer): "they could not be tried on rows of the first batch" for layer in layers}


def _is_known(layer: keras.layers.Layer) -> bool:
    """Whether a layer's calls are known to divide, or the layer has no `call`."""
    return computes_rows_independently(layer) or type(layer).call in (keras.Model.call, keras.layers.Layer.call)


class _TrialScope(WeightScope):
    """A scope in which `weights` replace a model's. A step can differentiate and assign them."""

    def __init__(self, values: list[tuple[keras.Variable, Any]], weights: dict[int, tf.Variable]):
        super().__init__(values, collect_losses=True)
        self._weights = weights
        self.state_mapping.update(weights)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if id(variable) in self._weights:
            self._weights[id(variable)].assign(value)
        else:
            super().add_update(update)


class StepTrial(PureFunction):
    """A step without updates, as a function of rows and of all variables but the weights."""

    def __init__(self, model: keras.Model, compute: Callable[[Batch], Any], rows: int):
        variables = all_variables(model)
        # Weights stay variables, as the step's tape watches variables that are read.
        self._weights = {id(each): tf.Variable(value_of(each)) for each in variables if each.trainable}
        self._trained = [each for each in variables if each.trainable]
        super().__init__(model, compute, total=rows, variables=[each for each in variables if not each.trainable])

    def renew(self) -> None:
        self._initial = {id(each): value_of(each) for each in self._trained}
        super().renew()

    def __call__(self, *arguments: Any) -> Any:
        for key, value in self._initial.items():
            self._weights[key].assign(value)
        return super().__call__(*arguments)

    def scope(self, state: State) -> keras.StatelessScope:
        return _TrialScope(list(zip(self.variables, state, strict=True)), self._weights)

    def check(self, traced: Any) -> None:
        """Checks nothing. A step may read variables of its own, and no assignment is carried out."""


class _Trial(StepTrial):
    """A step without updates. Its results are the relative errors of layers' calls in parts.

    If a row's output depends on a sum over many rows, a part may hardly change it. So calls of all rows, of which two
    are replaced, are compared too. The number of rows stays, and so does rounding.
    """

    def __init__(self, model: keras.Model, step: Callable[[Batch], Any], rows: int, entered: Mapping[int, str]):
        self.step, self.entered = step, entered
        # The layers that were called, what was compared, and how far it may be off.
        self.compared: list[tuple[keras.layers.Layer, str, Tolerance]] = []
        self._errors: list[tf.Tensor] = []
        super().__init__(model, self._errors_of_calls, rows)

    def _errors_of_calls(self, data: Batch) -> list[tf.Tensor]:
        self.compared, self._errors = [], []
        with capturing_applies(lambda *call: None), intercepting(self._call):
            self.step(data)
        return self._errors

    def _call(self, call: Callable[..., Structure], layer: keras.layers.Layer, arguments: Any, keywords: Any) -> Any:
        """Calls a layer whole and in two parts, and compares the results."""
        if id(layer) in self.entered:
            return NotImplemented
        layer_call = LayerCall(call, layer, arguments, keywords)
        total = layer_call.static
        if total is None or total < 2 or _is_known(layer):
            return call(*arguments, **keywords)
        if layer_call.find_obstacle(runs_twice=True):
            return NotImplemented
        bounds, rest = uneven_parts(total)
        whole, state = layer_call.whole, layer_call.state
        expected, gradients = self._part(layer_call, 0, total, whole, state)
        one, of_one = self._part(layer_call, *bounds, whole, state)
        other, of_other = self._part(layer_call, *rest, whole, one.state)
        self._compare(layer, "outputs", expected.rows, _concatenate(one.rows, other.rows))
        # A layer with a custom gradient may mix rows in the gradient only.
        self._compare(layer, "gradients", gradients.rows, _concatenate(of_one.rows, of_other.rows))
        sums = [a + b for a, b in zip(of_one.sums, of_other.sums, strict=True)]
        self._compare(layer, "gradients", gradients.sums, sums)
        if total > 2 and all(isinstance(row, tf.Tensor) for row in layer_call.rows):
            with random_numbers_of_part(0, total, total):
                changed = layer_call([tf.gather(row, among_others(total)) for row in layer_call.rows], whole, state)
            beside_others = list(map(with_ends_of, expected.rows, changed.rows))
            self._compare(layer, "outputs", expected.rows, beside_others, tolerance=OUTPUT)
        unseeded = [index for index, variable in enumerate(layer_call.assigned) if not is_seed(variable)]
        after, parted, before = ([each[index] for index in unseeded] for each in (expected.state, other.state, state))
        self._compare(layer, "states", after, parted, before)
        if unseeded and self.model.distribute_strategy.num_replicas_in_sync > 1:
            alone, _ = self._part(layer_call, *rest, whole, state)
            for pair in ((one, alone), (alone, one)):
                ends = [
                    aggregate(layer_call.assigned[index], *(each.state[index] for each in pair)) for index in unseeded
                ]
                self._compare(layer, "states", after, ends, before)
        return layer_call.finish(expected)

    @staticmethod
    def _part(layer_call: LayerCall, begin: int, end: int, whole: list[Any], state: list[Any]) -> tuple[Result, Result]:
        """The result for rows `begin` to `end`, and the gradient of a weighted sum of the outputs."""
        rows = rows_at(layer_call.rows, begin, end - begin)
        inputs = [
            [each for each in some if isinstance(each, tf.Tensor) and has_gradient(each)] for some in (rows, whole)
        ]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(inputs)
            with random_numbers_of_part(begin, end - begin, layer_call.static or 0):
                result = layer_call(rows, whole, state)
            target = sum_with_factors(result.rows, tf.cos(tf.range(float(begin), float(end))))
        zero: Any = "zero"
        gradients: Any = tape.gradient(target, inputs, unconnected_gradients=zero)
        of_rows, of_whole = (list(map(tf.convert_to_tensor, some)) for some in gradients)
        return result, Result(of_rows, of_whole, [])

    def _compare(
        self,
        layer: keras.layers.Layer,
        what: str,
        expected: list[Any],
        found: list[Any],
        before: list[Any] | None = None,
        tolerance: Tolerance = OUTPUT_OF_PART,
    ) -> None:
        for one, other, start in zip(expected, found, before or [None] * len(found), strict=True):
            self.compared.append((layer, what, tolerance))
            self._errors.append(largest_error(one, other, start))


def _concatenate(one: list[Any], other: list[Any]) -> list[Any]:
    return [tf.concat(pair, 0) for pair in zip(one, other, strict=True)]


class WindowProof:
    """Compares a step's weighted gradients on parts of `size` rows with the gradient on all."""

    def __init__(self, model: keras.Model, data: Batch, size: int, weighting: Weighting):
        self.model, self._rows, self._size, self._weighting = model, data, size, weighting
        self._function = StepTrial(model, self._compute, row_count(data))

    def ask(self) -> str | None:
        """Why the parts don't weigh what is stated, with the current weights, or `None`."""
        self._function.renew()
        whole = self._gradients(self._rows)
        parts, divisors = [], []
        for start, stop in even_parts(row_count(self._rows), self._size):
            rows = take_rows(self._rows, start, stop)
            weight = self._weighting.of_part(arguments_of(rows))
            divisors.append(0.0 if weight.summed else float(weight.never_zero.value))
            parts.append([(divisors[-1] or 1.0) * gradient for gradient in self._gradients(rows, start)])
        total = [np.sum(pieces, 0) / (sum(divisors) or 1.0) for pieces in zip(*parts, strict=True)]
        half = self._function.half_precision
        error = unexplained_error(whole, total, self._perturbed, half_precision=half)
        if not error:
            return None
        return (
            f"On {row_count(self._rows)} rows of the first batch, the weighted gradients of {len(parts)} parts are "
            f"{percent(error)} off the gradient of the whole"
        )

    def _perturbed(self) -> Iterator[list[np.ndarray]]:
        """Yields the whole's gradient after changes that affect only rounding and random numbers."""
        rows = self._rows
        yield self._gradients((perturb(rows[0]), *rows[1:]) if isinstance(rows, tuple) else perturb(rows))
        if not self._function.draws:
            yield self._gradients(gather_rows(rows, range(row_count(rows))[::-1]))

    def _gradients(self, rows: Batch, first: int = 0) -> list[np.ndarray]:
        return [np.asarray(each, "float64") for each in self._function(rows, None, first)[0]]

    def _compute(self, data: Batch) -> list[tf.Tensor]:
        captured: list[Gradients] = []
        with capturing_applies(lambda optimizer, gradients, variables: captured.append(gradients)):
            train_step_of(self.model)(data)
        (gradients,) = captured
        dense: list[Any] = [each for each in gradients if each is not None]
        return [tf.cast(tf.convert_to_tensor(each), "float32") for each in dense]
