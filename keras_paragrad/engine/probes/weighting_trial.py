"""Finds, by a trial on synthetic rows, the weighting with which parts' gradients sum to the whole batch's gradient.

A weighting is a candidate for the divisor of the loss. The weight of a part is its share of the whole's divisor, or 1
if the loss is a sum.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import added_losses, all_layers, percent
from keras_paragrad.compat.types import Array, Batch, LossArguments
from keras_paragrad.engine.losses.terms import compute_loss
from keras_paragrad.engine.losses.weightings import WEIGHTINGS, Weighting, output_mask
from keras_paragrad.engine.probes.pure_function import (
    PureFunction,
    State,
    draw_kernel,
    watch_weights,
)
from keras_paragrad.engine.probes.tolerances import ROUNDING, ROUNDING_OF_ADDED, ROUNDING_OF_TF32
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Inconclusive,
    gradients_match,
    relative_error,
    run_trial,
    synthetic_rows,
    take_rows,
)

Result = TypeVar("Result")
# The number of rows of the whole, and of the first of two parts of different sizes.
ROWS, FIRST = 8, 3
BOUNDS = ((0, FIRST), (FIRST, ROWS))
_WHOLE_AND_PARTS = ((0, ROWS), *BOUNDS)
# Values that programs use for ignored labels.
_IGNORED = (-100, -1, 255, math.nan)
# The number of samples over which a random loss is averaged.
_SAMPLES = 16
_QUESTION = "what the loss is divided by"


class Fit(NamedTuple):
    """The error of one weighting: the sum of the parts' weighted gradients against the whole's gradient.

    Attributes:
        weighting: The weighting.
        error: The largest relative error, or 0 if only rounding makes it.
    """

    weighting: Weighting
    error: float

    def __str__(self) -> str:
        return f"{self.weighting.argument} {'fits' if not self.error else f'is {percent(self.error)} off'}"


def fits_in_all_draws(candidates: Sequence[Weighting], draws: Sequence[Sequence[float]]) -> list[Fit]:
    """The fit of each candidate, from its errors in each draw."""
    return [Fit(candidate, max(errors)) for candidate, errors in zip(candidates, zip(*draws, strict=True), strict=True)]


class WeightingTrial(NamedTuple):
    """The result of a trial.

    Attributes:
        fits: The error of each weighting that was tried, in the order of preference.
        ambiguous: Whether a mask hid nothing, so that it can't be told from the number of examples.
        random: Whether random numbers could not be drawn by row, so that averages of losses were compared.
    """

    fits: list[Fit]
    ambiguous: bool = False
    random: bool = False

    @property
    def fitting(self) -> list[Weighting]:
        """The weightings that fit."""
        return [fit.weighting for fit in self.fits if not fit.error]

    def __str__(self) -> str:
        return ", ".join(map(str, self.fits))


def try_weightings(model: keras.Model, arguments: LossArguments, stated: Weighting | None) -> WeightingTrial | None:
    """Finds the divisor of a model's loss, and checks a stated one; `None` if synthetic rows can't tell.

    Compares gradients, not losses: before training, all predictions may be equal, and then so are the means of losses.
    """
    candidates = list(WEIGHTINGS.values())
    if stated is not None and stated not in candidates:
        candidates.insert(0, stated)
    if arguments["sample_weight"] is None:
        candidates.remove(WEIGHTINGS["sample_weight"])
    question = f"whether weighting={stated.argument} is what the loss is divided by" if stated else _QUESTION
    return run_trial(
        lambda size: _Trial(model, candidates).run(arguments, size), *SIZES, otherwise=None, question=question
    )


class _Draw(NamedTuple):
    """The candidates' errors on one batch, and whether the output's mask keeps different shares of the parts' rows."""

    errors: list[float]
    mask_hides: bool


class _Computed(NamedTuple):
    """The gradient, the loss, its candidate divisors (0 for a sum), and the gradients and values of added losses.

    The weight of added losses is often so small that their error looks like rounding, though it matters in training.
    """

    gradients: list[tf.Tensor]
    loss: tf.Tensor
    divisors: list[tf.Tensor]
    gradients_of_added: list[tf.Tensor]
    added: list[tf.Tensor]


class _Trial:
    """Computes the gradient of a model's loss on synthetic rows, and the loss's candidate divisors."""

    def __init__(self, model: keras.Model, candidates: list[Weighting]):
        self.model, self.candidates = model, candidates
        self.compute = PureFunction(model, self._gradients, total=ROWS)
        self.has_mask = False
        self._random: bool | None = None

    def run(self, arguments: LossArguments, size: int) -> WeightingTrial:
        """Compares parts with the whole in several draws."""
        data = tuple(arguments[name] for name in ("x", "y", "sample_weight"))
        draws = over_draws(self.model, data, size, self._compare)
        fits = fits_in_all_draws(self.candidates, [draw.errors for draw in draws])
        fits = [fit for fit in fits if self.has_mask or fit.weighting is not WEIGHTINGS["mask"]]
        trial = WeightingTrial(fits, random=bool(self._random))
        hides = any(draw.mask_hides for draw in draws)
        return trial._replace(ambiguous=self.has_mask and not hides and WEIGHTINGS["mask"] in trial.fitting)

    def _compare(self, batch: Batch) -> _Draw:
        if self._random is None:
            self._random = self._is_random(batch)
        if self._random:
            return _Draw(self._errors_on_average(batch), False)
        results = compute_parts(self.compute, batch)
        shares = part_weights([result.divisors for result in results])
        errors_with = functools.partial(errors_of, shares=shares, half_precision=self.compute.half_precision)
        errors = errors_with([result.gradients for result in results])
        if results[0].added:
            others = [part.gradients_of_added for part in compute_parts(self.compute, batch, self._drawn)]
            values = [result.added for result in results]
            for added in ([result.gradients_of_added for result in results], others, values):
                # Added losses may have no gradient.
                with contextlib.suppress(Inconclusive):
                    errors = list(map(max, errors, errors_with(added, rounding=ROUNDING_OF_ADDED)))
        names = [candidate.name for candidate in self.candidates]
        by_rows, by_mask = (shares[:, names.index(name)] for name in ("examples", "mask"))
        return _Draw(errors, not np.allclose(by_rows, by_mask))

    @functools.cached_property
    def _drawn(self) -> State:
        """The state with kernels drawn at random: the model's kernels may route all rows to one expert."""
        pairs = zip(self.compute.variables, self.compute.start, strict=True)
        return [draw_kernel(variable, value) for variable, value in pairs]

    def _gradients(self, data: Any) -> _Computed:
        """What `self.compute` traces."""
        with watch_weights(self.model) as gradients_of:
            loss, inputs, _ = compute_loss(self.model, data)
            # Keras differentiates the sum of an unreduced loss.
            loss = tf.cast(tf.reduce_sum(loss), "float32")
            added = [tf.cast(tf.reduce_sum(loss), "float32") for loss in added_losses(self.model)]
        self.has_mask = output_mask(inputs["y_pred"]) is not None
        gradients = gradients_of(loss)
        if not gradients:
            raise Inconclusive("the loss has no gradient")
        divisors = [tf.cast(candidate.value(inputs), "float32") for candidate in self.candidates]
        total = [tf.add_n(added)] if added else []
        return _Computed(gradients, loss, divisors, gradients_of(total[0]) if added else [], total)

    def _is_random(self, batch: Batch) -> bool:
        """Whether the gradient of the whole changes with the seeds."""
        whole, reseeded = self.compute(batch)[0], self.compute(batch, self.compute.reseed())[0]
        return not gradients_match(whole.gradients, reseeded.gradients, half_precision=self.compute.half_precision)

    def _errors_on_average(self, batch: Batch) -> list[float]:
        """Compares mean losses of samples instead of gradients: a wrong divisor is usually off by an integer factor."""

        def sample(number: int, start: int, stop: int) -> tuple[np.ndarray, Any]:
            """The losses of some rows with `_SAMPLES` seeds, different for each `number`, and their divisors."""
            states = (self.compute.reseed(by=_SAMPLES * number + draw) for draw in range(_SAMPLES))
            results = [self.compute(take_rows(batch, start, stop), state, start)[0] for state in states]
            return np.array([float(result.loss) for result in results]), results[-1].divisors

        (whole, _), *of_parts = samples = [sample(number, *rows) for number, rows in enumerate(_WHOLE_AND_PARTS)]
        errors = []
        for shares in part_weights([divisors for _, divisors in samples]).T:
            total = np.sum([losses * share for (losses, _), share in zip(of_parts, shares, strict=True)], axis=0)
            noise = np.sqrt((whole.var() + total.var()) / _SAMPLES)
            error, scale = abs(whole.mean() - total.mean()), abs(whole.mean())
            errors.append(0.0 if error <= max(0.1 * scale, 5 * noise) else float(error / max(scale, 1e-30)))
        return errors


def compute_parts(compute: PureFunction, batch: Batch, state: State | None = None) -> list[Any]:
    """Computes a whole batch, then each of its parts."""
    return [compute(take_rows(batch, *rows), state, rows[0])[0] for rows in _WHOLE_AND_PARTS]


def part_weights(divisors: Sequence[Sequence[Any]]) -> np.ndarray:
    """Each part's weight under each candidate, `(parts, candidates)`, from the divisors of the whole and the parts."""
    total, *of_parts = np.asarray(divisors, "float64")
    return np.where(total == 0, 1.0, np.asarray(of_parts) / np.where(total == 0, 1.0, total))


def errors_of(
    gradients: Sequence[Sequence[Array]],
    shares: np.ndarray,
    *,
    half_precision: bool,
    rounding: float | None = None,
) -> list[float]:
    """The relative error of the parts' weighted gradients for each candidate; 0 if it is within rounding.

    Args:
        gradients: The gradients of the whole and of the parts, with a tensor for each weight.
        shares: The weight of each part, for each candidate: `(parts, candidates)`.
        half_precision: Whether they were computed in half precision.
        rounding: The largest relative error that only rounding makes; if `None`, as coarse as this machine's products.

    Raises:
        Inconclusive: The gradient of the whole is 0 or not finite.
    """
    whole, *of_parts = gradients
    expected = [np.asarray(gradient, "float64") for gradient in whole]
    if relative_error(expected, expected) is None:
        # For example the logarithm of a label of 0. Every weighting would fit.
        raise Inconclusive("the loss has no finite gradient other than 0 on synthetic rows")
    errors = []
    for weights in shares.T:
        total = [
            np.sum([weight * np.asarray(part, "float64") for weight, part in zip(weights, pieces, strict=True)], 0)
            for pieces in zip(*of_parts, strict=True)
        ]
        error = relative_error(expected, total) or 0.0
        matches = gradients_match(expected, total, half_precision=half_precision)
        errors.append(0.0 if matches and (half_precision or error <= (rounding or _rounding())) else error)
    return errors


@functools.cache
def _rounding() -> float:
    """The largest relative error that only rounding makes, with or without TF32."""
    coarse = tf.config.experimental.tensor_float_32_execution_enabled() and tf.config.list_physical_devices("GPU")
    return ROUNDING_OF_TF32 if coarse else ROUNDING


def over_draws(
    model: keras.Model, batch: Batch, size: int, compare: Callable[[Any], Result], count: int = ROWS
) -> list[Result]:
    """Runs `compare` on typical, widely spread, padded and partly ignored batches of synthetic rows.

    Labels are 0 and 1, or numbers between for losses that reject 0. Only widely spread rows, with all tokens of a
    vocabulary, are routed to different experts.

    Args:
        model: The model, whose `Masking` layers say what is padded with.
        batch: Tensors with the shapes and dtypes to draw: `(x, y, sample_weight)`, a shorter tuple, or `x` alone.
        size, count: The size of axes of unknown size, and the number of rows.
        compare: Takes a batch of the same nesting.

    Raises:
        Inconclusive: No batch gives a result.
    """
    rows = functools.partial(synthetic_rows, rows=count, size=size)
    data = batch if isinstance(batch, tuple) else (batch,)

    def draw(seed: int, classes: bool = True) -> list[Any]:
        return [rows(leaf, seed=3 * seed + index, labels=classes and index == 1) for index, leaf in enumerate(data)]

    padding = next((layer.mask_value for layer in all_layers(model) if isinstance(layer, keras.layers.Masking)), 0)
    x, *others = draw(1)
    weights = keras.tree.map_structure(lambda leaf: _replace(leaf, 0, _is_padded), others[1:])
    padded = keras.tree.map_structure(lambda leaf: _replace(leaf, padding, _is_padded), x)
    tokens = min(
        (layer.input_dim for layer in all_layers(model) if isinstance(layer, keras.layers.Embedding)), default=2
    )
    distant = rows(data[0], seed=2, low=-3.0, high=3.0, tokens=tokens)
    batches = [tuple(draw(0)), tuple(draw(0, classes=False)), (distant, *others), (padded, *others[:1], *weights)]
    for label in _IGNORED if others else ():
        labels = keras.tree.map_structure(lambda leaf, label=label: _replace(leaf, label, _is_ignored), others[0])
        batches.append((x, labels, *others[1:]))
    results, nothing_told = [], None
    for index, drawn in enumerate(batches):
        try:
            results.append(compare(drawn if isinstance(batch, tuple) else drawn[0]))
        except Inconclusive as reason:
            nothing_told = nothing_told or reason
        except Exception:
            # A loss for classes rejects fractional labels, and a loss that ignores no label rejects the ignored ones.
            # The first batch is a typical one.
            if not index:
                raise
    if not results:
        raise nothing_told or Inconclusive("there are no synthetic rows")
    return results


def _is_padded(shape: list[int], draw: np.random.Generator) -> np.ndarray:
    """Masks a tail of each row, of varying length; for vectors, every fourth row."""
    if len(shape) == 1:
        return np.arange(shape[0]) % 4 == 1
    lengths = draw.integers(1, shape[1] + 1, shape[0])
    # The tails have different lengths.
    lengths[[0, 1]] = shape[1], max(shape[1] // 2, 1)
    return (np.arange(shape[1]) >= lengths[:, None]).reshape([*shape[:2], *[1] * (len(shape) - 2)])


def _is_ignored(shape: list[int], draw: np.random.Generator) -> np.ndarray:
    """Masks some elements, at least one, but none in the first row of each part."""
    chosen = draw.uniform(size=shape) < 0.3
    chosen.reshape(len(chosen), -1)[1, 0] = True
    chosen[[0, FIRST]] = False
    return chosen


def _replace(tensor: Any, value: float, choose: Callable[[list[int], np.random.Generator], np.ndarray]) -> Any:
    """Replaces the elements that `choose` masks by a value.

    Keeps a tensor of integers if the value is 0, which is drawn anyway, or not an integer of the tensor's dtype.
    """
    if tensor is None or tensor.dtype.is_bool:
        return tensor
    if tensor.dtype.is_integer and not (value and tensor.dtype.min <= value <= tensor.dtype.max):
        return tensor
    return tf.where(choose(tensor.shape.as_list(), np.random.default_rng(0)), tf.cast(value, tensor.dtype), tensor)
