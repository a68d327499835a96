"""How the stages of a pipeline overlap, from the operations of a trace."""

import collections
import itertools
from collections.abc import Iterable, Sequence

from keras_paragrad.profiling.analysis.coverage import Coverage
from keras_paragrad.profiling.analysis.events import OfStage
from keras_paragrad.profiling.summary import PipelineTime, StageWork, StepTime

NANOSECONDS = 1e6
# Of the time drawn: operations of a micro-batch that are this close to each other are drawn as one.
_CLOSE = 1 / 250


def pipeline_time(operations: Sequence[OfStage], steps: Sequence[StepTime], origin: float) -> PipelineTime | None:
    """How the stages overlap, or `None` if there are none.

    Args:
        operations: All operations of stages.
        steps: The steps.
        origin: When the first step begins, in nanoseconds.

    Example:

    >>> from keras_paragrad.profiling.analysis.events import OfStage
    >>> from keras_paragrad.profiling.summary import StepTime
    >>> forward = [OfStage(stage, 0, part, False, 1e6 * (stage + part), 1e6 * (stage + part + 1))
    ...            for stage in range(2) for part in range(3)]
    >>> found = pipeline_time(forward, [StepTime(0, 0, 0.0, 4.0)], 0.0)
    >>> found.bubble, found.ideal
    (0.25, 0.25)
    """
    operations = sorted(operations, key=lambda each: each.begin)
    found = [(step, _within(operations, step, origin)) for step in steps]
    # A step of the validation data has one micro-batch, and none backward.
    found = [(step, inside) for step, inside in found if inside]
    if not found:
        return None
    lanes = {(each.stage, each.column) for _, inside in found for each in inside}
    stages = 1 + max(stage for stage, _ in lanes)
    columns = 1 + max(column for _, column in lanes)
    found = [(step, _numbered(inside, columns)) for step, inside in found]
    microbatches = 1 + max(each.micro_batch for _, inside in found for each in inside)
    spans = [_span(inside) for _, inside in found]
    busy = sum(_busy(inside, lane) for _, inside in found for lane in lanes)
    total = len(lanes) * sum(end - begin for begin, end in spans)
    by_length = sorted(zip(spans, found, strict=True), key=lambda each: each[0][1] - each[0][0])
    (begin, end), (step, inside) = by_length[len(by_length) // 2]
    passes = -(-microbatches // columns)
    return PipelineTime(
        stages,
        columns,
        microbatches,
        bubble=1 - busy / total if total else 0.0,
        ideal=(stages - 1) / (passes + stages - 1),
        step=step.step,
        duration=(end - begin) / NANOSECONDS,
        work=tuple(_work(inside, begin, _CLOSE * (end - begin))),
    )


def _within(operations: Iterable[OfStage], step: StepTime, origin: float) -> list[OfStage]:
    begin = origin + NANOSECONDS * step.begins
    return [each for each in operations if begin <= each.begin < begin + NANOSECONDS * step.duration]


def _numbered(operations: Iterable[OfStage], columns: int) -> list[OfStage]:
    """With the micro-batches of programs: in a step, each takes one after the other, in turns with other columns."""
    runs: dict[str, int] = collections.Counter()
    numbered = []
    for each in operations:
        if each.program:
            number = each.column + columns * runs[each.program]
            runs[each.program] += 1
            each = OfStage(each.stage, each.column, number, *each[3:])
        numbered.append(each)
    return numbered


def _span(operations: Iterable[OfStage]) -> tuple[float, float]:
    each = list(operations)
    return min(one.begin for one in each), max(one.end for one in each)


def _busy(operations: Iterable[OfStage], lane: tuple[int, int]) -> float:
    spans = [(each.begin, each.end) for each in operations if (each.stage, each.column) == lane]
    return Coverage(spans).within(*_span(operations)) if spans else 0.0


def _work(operations: Iterable[OfStage], origin: float, close: float) -> list[StageWork]:
    """What is drawn of a step: stretches of operations of the same micro-batch."""
    found = []
    ordered = sorted(operations, key=lambda each: (each[:4], each.begin))
    for key, group in itertools.groupby(ordered, key=lambda each: each[:4]):
        stretches: list[list[float]] = []
        for each in group:
            if stretches and each.begin <= stretches[-1][1] + close:
                stretches[-1][1] = max(stretches[-1][1], each.end)
            else:
                stretches.append([each.begin, each.end])
        # Constants and reads of variables, which wait for nothing, are too short to be seen.
        shown = [each for each in stretches if each[1] - each[0] > close / 4]
        found += [
            StageWork(*key, round((begin - origin) / NANOSECONDS, 4), round((end - begin) / NANOSECONDS, 4))
            for begin, end in shown
        ]
    return found
