"""The report's view of several workers: the batches of each, side by side, and the worker that the others wait for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_paragrad.profiling.report.formatting import Axis, axis_for, count, milliseconds, share
from keras_paragrad.profiling.report.lanes import Box, Lane, LanesChart
from keras_paragrad.profiling.report.runs import WorkerBatches

MOST_DRAWN = 16
MOST_BATCHES = 16
# Times of workers that differ by less are taken as equal.
_NOTICEABLE = 1.1


@dataclass(frozen=True)
class WorkersView:
    """The workers in one window.

    Attributes:
        chart: A lane for each worker.
        verdict: Which worker is the slowest.
        evidence: By how much.
    """

    chart: LanesChart
    verdict: str
    evidence: str


def workers_view(workers: Sequence[WorkerBatches]) -> WorkersView | None:
    """The view of the workers' batches, or `None` for fewer than two workers, or if nothing was measured."""
    if len(workers) < 2 or not any(worker.waiting.any() for worker in workers):
        return None
    own = [float(np.median(worker.own)) for worker in workers]
    verdict, evidence = _verdict(workers, own)
    return WorkersView(_chart(workers, own, evidence), verdict, evidence)


def _verdict(workers: Sequence[WorkerBatches], own: Sequence[float]) -> tuple[str, str]:
    """Sentences on which worker is the slowest and by how much; `own` are the medians of each one's own work."""
    slowest = int(np.argmax(own))
    number, longest = workers[slowest].worker, own[slowest]
    others = float(np.median([time for index, time in enumerate(own) if index != slowest]))
    evidence = (
        f"worker {number} computes {milliseconds(longest)} per batch, the others {milliseconds(others)}; the rest is "
        "spent waiting (medians)"
    )
    if longest < _NOTICEABLE * others:
        return f"The workers are about equally fast; worker {number} is marginally the slowest.", evidence
    return f"Worker {number} is the slowest: check its input, and what else runs on its machine.", evidence


def _chart(workers: Sequence[WorkerBatches], own: Sequence[float], evidence: str) -> LanesChart:
    """Draws the first batches of the slowest workers by their medians of own work; its table has all workers."""
    # The slowest ones, in the workers' order.
    chosen = sorted(sorted(range(len(workers)), key=lambda index: -own[index])[:MOST_DRAWN])
    drawn = [workers[index] for index in chosen]
    longest = max(float(worker.milliseconds[:MOST_BATCHES].sum()) for worker in drawn)
    x_axis = axis_for([longest], milliseconds, may_be_logarithmic=False)
    height = 100 / len(drawn)
    batches = drawn[0].batches[:MOST_BATCHES]
    notes = ["Each lane begins with the worker's first batch. Waiting time is drawn at the end of each batch."]
    if len(drawn) < len(workers):
        notes.append(f"The {len(drawn)} slowest of {count(len(workers))} workers are drawn.")
    return LanesChart(
        title=f"Batches {count(batches[0])} to {count(batches[-1])} of each worker",
        x_axis=x_axis,
        lanes=tuple(_lane(worker, index * height, height, x_axis) for index, worker in enumerate(drawn)),
        legend=(("compute", "its own work"), ("collective", "waiting for other workers")),
        heads=("worker", "batch, median", "own work", "waiting", "waiting share"),
        rows=tuple(_cells(worker) for worker in workers),
        description=f"{count(len(workers))} workers: {evidence}.",
        note=" ".join(notes),
    )


def _lane(worker: WorkerBatches, top: float, height: float, x_axis: Axis) -> Lane:
    """A worker's lane: for each batch, a box for its own work and one for waiting."""
    name = f"worker {worker.worker}"
    boxes: list[Box] = []
    start = 0.0
    for batch, own, waiting in list(zip(worker.batches, worker.own, worker.waiting, strict=True))[:MOST_BATCHES]:
        for kind, time, label in (("compute", own, "its own work"), ("collective", waiting, "waiting")):
            if time > 0:
                left, right = x_axis.position(start), x_axis.position(start + float(time))
                tooltip = f"{name}, batch {count(batch)}, {label}: {milliseconds(float(time))}"
                boxes.append(Box(kind, left, round(right - left, 2), "", tooltip))
                start += float(time)
    return Lane(name, round(top + 0.1 * height, 2), round(0.8 * height, 2), tuple(boxes))


def _cells(worker: WorkerBatches) -> tuple[str, ...]:
    medians = [float(np.median(times)) for times in (worker.milliseconds, worker.own, worker.waiting)]
    waited = float(worker.waiting.sum() / (worker.milliseconds.sum() or 1.0))
    return (str(worker.worker), *map(milliseconds, medians), share(waited))
