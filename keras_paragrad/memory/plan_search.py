"""`PlanSearch`: tries the ways to train of a `MemoryPlan`, from the fastest on, until one fits."""

import dataclasses
import logging
from collections.abc import Callable

from keras_paragrad.memory.available import STEP_SHARE
from keras_paragrad.memory.plan_table import Candidate, MemoryPlan, way_in_words
from keras_paragrad.memory.trial import CannotTryError, Measured, warn_untried
from keras_paragrad.plain_text import bytes_in_words, counted

_log = logging.getLogger("keras_paragrad")
# Ways that are tried, though a trial says that they take too much, before all are refused.
_LAST_RESORTS = 3
# Trains in one way, and returns what it took; `None` if memory ran out. Raises `CannotTryError`.
Try = Callable[[Candidate], Measured | None]


class PlanSearch:
    """Chooses the first of a plan's candidates that fits.

    Args:
        plan: The plan.
        begin: Makes the trial; without it, the estimate decides.
        log: Gets a line for each trial.
    """

    def __init__(self, plan: MemoryPlan, begin: Callable[[], Try] | None, log: Callable[[str], None]):
        self._plan, self._begin, self._log = plan, begin, log
        self._failed: list[Candidate] = []
        # The most bytes that a trial took besides the estimate, such as for the graph.
        self._besides = 0
        # Whether batches can be cut into slices, as far as trials have shown.
        self._can_slice = True

    def run(self) -> None:
        """Sets the plan's `chosen` candidate.

        Raises:
            ValueError: Nothing fits. The message says what to write.
        """
        plan, left_out = self._plan, list(self._plan.left_out)
        try:
            for index, candidate in enumerate(plan.candidates):
                if self._settle(index, self._why_not(candidate)):
                    return
            # Estimates may be too large.
            if self._begin and any(self._settle(index, "") for index in self._last_resorts()):
                return
        except CannotTryError as error:
            warn_untried("fit_memory", plan.model, error)
            # Whether it can be cut into slices is as unknown as before.
            plan.left_out, plan.candidates = left_out, [dataclasses.replace(way, why_not="") for way in plan.candidates]
            PlanSearch(plan, None, self._log).run()
            return
        _refuse(plan, tried=bool(self._failed))

    def _why_not(self, candidate: Candidate) -> str:
        """Why a candidate needs no trial, or an empty string."""
        if not self._can_slice and candidate.choice.slices > 1:
            return "can't be cut into slices"
        limit = self._plan.device_bytes if self._begin else STEP_SHARE * self._plan.device_bytes
        if candidate.estimated.bytes + self._besides > limit:
            return "too much"
        if any(candidate.estimated.bytes >= other.estimated.bytes for other in self._failed):
            return "more than one that was too much"
        return ""

    def _settle(self, index: int, why_not: str) -> bool:
        """Tries a candidate, unless `why_not` is given; notes the result in the plan, and says whether it is chosen."""
        plan = self._plan
        if not why_not and self._begin:
            why_not = self._try(index, self._begin)
        plan.candidates[index] = dataclasses.replace(plan.candidates[index], why_not=why_not)
        plan.chosen = None if why_not else plan.candidates[index]
        return not why_not

    def _try(self, index: int, begin: Callable[[], Try]) -> str:
        """Trains in one way; returns why it isn't chosen, or nothing.

        Raises:
            CannotTryError: The model can't be trained in another process.
        """
        plan, candidate = self._plan, self._plan.candidates[index]
        trial = begin()
        try:
            measured = trial(candidate)
        except CannotTryError as error:
            if candidate.choice.slices == 1:
                raise
            self._can_slice = False
            plan.left_out.append(f"No slices: {str(error).rstrip('.')}.")
            return "can't be cut into slices"
        plan.trials += 1
        plan.candidates[index] = dataclasses.replace(candidate, measured=measured)
        limit = bytes_in_words(plan.device_bytes)
        fits = measured is not None and measured.bytes <= plan.device_bytes
        took = "more than" if measured is None else f"{bytes_in_words(measured.bytes)} of"
        self._log(f"{way_in_words(candidate, plan.recomputed)}: {took} {limit}{'' if fits else ', too much'}.")
        # A process that took too much was ended at the limit.
        taken = measured.bytes if measured else plan.device_bytes
        self._besides = max(self._besides, taken - candidate.estimated.bytes)
        if fits:
            return ""
        self._failed.append(candidate)
        return "too much"

    def _last_resorts(self) -> list[int]:
        """The candidates to try before all are refused: the fastest that may fit, and the one with the least bytes."""
        tried = {candidate.choice for candidate in self._failed}
        untried = [
            index
            for index, candidate in enumerate(self._plan.candidates)
            if candidate.choice not in tried and (self._can_slice or candidate.choice.slices == 1)
        ]
        if not untried:
            return []
        taken = [candidate.estimated.bytes for candidate in self._plan.candidates]
        failed = min((candidate.estimated.bytes for candidate in self._failed), default=self._plan.device_bytes)
        fastest = [index for index in untried if taken[index] < min(failed, self._plan.device_bytes)]
        least = min(untried, key=lambda index: taken[index])
        return list(dict.fromkeys([*fastest[:_LAST_RESORTS], least]))


def _refuse(plan: MemoryPlan, *, tried: bool) -> None:
    """Raises, as no candidate fits; if none was `tried`, may instead choose the one with the least bytes, and warn."""
    least = min(plan.candidates, key=lambda candidate: candidate.estimated.bytes)
    words = way_in_words(least, plan.recomputed)
    takes = bytes_in_words(least.estimated.bytes)
    if not tried and least.estimated.bytes <= plan.device_bytes:
        plan.chosen = dataclasses.replace(least, why_not="")
        plan.candidates = [plan.chosen if other is least else other for other in plan.candidates]
        _log.warning(
            "A step of %s may run out of memory: it is estimated to take %s per device, of %s, %s.",
            *(plan.model, takes, bytes_in_words(plan.device_bytes), words),
        )
        return
    reasons = " ".join(plan.left_out)
    more = ", and more in a trial" if least.estimated.bytes <= plan.device_bytes else ""
    # Slices take what the update of a single row does, but for the batch that they are cut from.
    sliced = any(candidate.choice.slices > 1 for candidate in plan.candidates)
    instead = "an optimizer that keeps less, such as SGD, or a smaller model" if sliced else "or a smaller batch"
    raise ValueError(
        f"A batch of {plan.batch_size} of {plan.model!r} doesn't fit in {bytes_in_words(plan.device_bytes)} on each of "
        f"{counted(plan.replicas, 'device')}. The least is estimated to take {takes}, {words}{more}."
        f"{reasons and ' '}{reasons} Use more devices, {instead}."
    )
