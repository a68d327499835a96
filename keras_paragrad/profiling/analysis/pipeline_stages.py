"""How the stages of a pipeline overlap, from the operations of a trace."""

import collections
import itertools
from collections.abc import Iterable, Sequence

from keras_paragrad.profiling.analysis.events import NANOSECONDS, Coverage, StageOperation
from keras_paragrad.profiling.summary import PipelineTime, StageWork, StepTime

# Operations of a micro-batch with a gap below this fraction of the step are drawn as one.
_GAP = 1 / 250


def pipeline_time(
    operations: Sequence[StageOperation], steps: Sequence[StepTime], origin: float
) -> PipelineTime | None:
    """How the stages overlap, or `None` if there are none.

    Args:
        operations: All operations of stages.
        steps: The steps.
        origin: The begin of the first step, in nanoseconds.

    Example:

    >>> from keras_paragrad.profiling.analysis.events import StageOperation
    >>> from keras_paragrad.profiling.summary import StepTime
    >>> forward = [StageOperation(stage, 0, part, False, 1e6 * (stage + part), 1e6 * (stage + part + 1))
    ...            for stage in range(2) for part in range(3)]
    >>> times = pipeline_time(forward, [StepTime(0, 0, 0.0, 4.0)], 0.0)
    >>> times.bubble, times.ideal
    (0.25, 0.25)
    """
    operations = sorted(operations, key=lambda each: each.begin)
    by_step = [(step, _within(operations, step, origin)) for step in steps]
    by_step = [(step, inside) for step, inside in by_step if inside]
    if not by_step:
        return None
    lanes = {(each.stage, each.column) for _, inside in by_step for each in inside}
    stages = 1 + max(stage for stage, _ in lanes)
    columns = 1 + max(column for _, column in lanes)
    by_step = [(step, _number_programs(inside, columns)) for step, inside in by_step]
    microbatches = 1 + max(each.micro_batch for _, inside in by_step for each in inside)
    spans = [_span(inside) for _, inside in by_step]
    busy = sum(_busy(inside, lane) for _, inside in by_step for lane in lanes)
    total = len(lanes) * sum(end - begin for begin, end in spans)
    by_length = sorted(zip(spans, by_step, strict=True), key=lambda each: each[0][1] - each[0][0])
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
        work=tuple(_work(inside, begin, _GAP * (end - begin))),
    )


def _within(operations: Iterable[StageOperation], step: StepTime, origin: float) -> list[StageOperation]:
    begin = origin + NANOSECONDS * step.begins
    return [each for each in operations if begin <= each.begin < begin + NANOSECONDS * step.duration]


def _number_programs(operations: Iterable[StageOperation], columns: int) -> list[StageOperation]:
    """Numbers the micro-batches of programs' runs: columns take turns, each in order."""
    runs: dict[str, int] = collections.Counter()
    numbered = []
    for each in operations:
        if each.program:
            number = each.column + columns * runs[each.program]
            runs[each.program] += 1
            each = StageOperation(each.stage, each.column, number, *each[3:])
        numbered.append(each)
    return numbered


def _span(operations: Iterable[StageOperation]) -> tuple[float, float]:
    spans = [(each.begin, each.end) for each in operations]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _busy(operations: Iterable[StageOperation], lane: tuple[int, int]) -> float:
    spans = [(each.begin, each.end) for each in operations if (each.stage, each.column) == lane]
    return Coverage(spans).within(*_span(operations)) if spans else 0.0


def _work(operations: Iterable[StageOperation], origin: float, gap: float) -> list[StageWork]:
    """Joins operations of the same micro-batch into intervals."""
    work = []
    ordered = sorted(operations, key=lambda each: (each[:4], each.begin))
    for key, group in itertools.groupby(ordered, key=lambda each: each[:4]):
        intervals: list[list[float]] = []
        for each in group:
            if intervals and each.begin <= intervals[-1][1] + gap:
                intervals[-1][1] = max(intervals[-1][1], each.end)
            else:
                intervals.append([each.begin, each.end])
        work += [
            StageWork(*key, round((begin - origin) / NANOSECONDS, 4), round((end - begin) / NANOSECONDS, 4))
            for begin, end in intervals
            # Constants and reads of variables are too short to draw, and wait for nothing.
            if end - begin > gap / 4
        ]
    return work
