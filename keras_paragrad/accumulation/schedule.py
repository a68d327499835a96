"""How many micro-batches an update takes, as a function of the update."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_integer, refusal, shown

Steps = int | Sequence[Sequence[int]] | Callable[[Any], Any]

_EXPECTED = (
    "an integer of at least 1, pairs of (first update, steps) such as [(0, 2), (100, 8)], or a function of the update "
    "that TensorFlow can trace"
)


class StepsSchedule:
    """The number of micro-batches in the window that ends with a given update.

    Args:
        steps: An integer; pairs `(first_update, steps)` in ascending order, starting at update 0; or a callable that
            takes the number of updates made so far, a scalar int64 tensor, and returns an integer scalar.

    Raises:
        ValueError: The schedule is empty, unsorted or does not begin at 0, or gives anything but integers of at
            least 1.

    Attributes:
        steps: The steps as plain integers, which a config can hold.

    Example:

    >>> from keras_paragrad.accumulation.schedule import StepsSchedule
    >>> schedule = StepsSchedule([(0, 2), (100, 8)])
    >>> [schedule.at(update) for update in (0, 99, 100)]
    [2, 2, 8]
    """

    def __init__(self, steps: Steps):
        self.function = steps if callable(steps) else None
        self.pairs = [] if callable(steps) else _checked_pairs(steps)
        self.steps: Steps = self.pairs if isinstance(steps, (list, tuple)) else self.function or self.pairs[0][1]
        if self.function:
            self._check_function()

    def _check_function(self) -> None:
        try:
            self.at(0)
        except ValueError:
            raise
        except Exception as error:
            raise refusal("steps", self.function, f"{_EXPECTED}; this one raised {error!r:.200}", "4") from error
        try:
            tf.function(self, autograph=False).get_concrete_function(tf.TensorSpec((), tf.int64))
        except Exception as error:
            raise ValueError(
                "`steps` accepts a number, but can't be traced by TensorFlow, which passes a scalar int64 tensor: "
                f"{error} Use tf.where instead of `if`."
            ) from error

    @property
    def is_constant(self) -> bool:
        """Whether every update takes the same number of micro-batches."""
        return len(self.pairs) == 1

    def __call__(self, update: Any) -> tf.Tensor:
        """The steps of the window that ends with `update`, as an int64 scalar; can be traced."""
        update = tf.cast(tf.convert_to_tensor(update), tf.int64)
        if self.function:
            return tf.cast(self.function(update), tf.int64)
        steps = tf.constant(self.pairs[0][1], tf.int64)
        for first, count in self.pairs[1:]:
            steps = tf.where(update >= first, tf.constant(count, tf.int64), steps)
        return steps

    def at(self, update: int) -> int:
        """The same as a Python integer, for the host; a callable's result is checked."""
        if self.function is None:
            return next(count for first, count in reversed(self.pairs) if update >= first)
        answer = keras.ops.convert_to_numpy(self.function(tf.constant(update, tf.int64)))
        if answer.shape != () or answer.dtype.kind not in "iu" or answer < 1:
            raise ValueError(
                f"`steps` returned {shown(answer)} for update {update}. It must return an integer of at least 1."
            )
        return int(answer)


def _checked_pairs(steps: Any) -> list[tuple[int, int]]:
    given = steps if isinstance(steps, (list, tuple)) else [(0, steps)]
    try:
        pairs = [(check_integer("steps", first, least=0), check_integer("steps", count)) for first, count in given]
    except Exception:  # not pairs, not integers, or a user's __iter__ that raises
        pairs = []
    if not pairs:
        raise refusal("steps", steps, _EXPECTED, "4")
    firsts = [first for first, _ in pairs]
    if firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ValueError(
            f"`steps` changes at updates {shown(firsts)}, which must start at 0 and increase. "
            f"Write steps={sorted({0: pairs[0][1], **dict(pairs)}.items())}."
        )
    return pairs
