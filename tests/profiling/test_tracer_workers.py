"""Two workers: the first is traced, and says what it saw; TensorFlow's profiler would crash the other now and then."""

import json

import numpy as np
import pytest
from runner.own_process import on_workers
from trainings.profiled import profiled_by_worker

from keras_paragrad.profiling.report.lanes import workers_blocks
from keras_paragrad.profiling.report.runs import read_workers
from keras_paragrad.profiling.summary import ProfileSummary
from keras_paragrad.profiling.tracer import FIRST_WORKER_ALONE


def trained(folder, per_call):
    first, second = on_workers(profiled_by_worker, (folder / "logs", per_call), seconds=240)
    summaries = [
        ProfileSummary.from_dict(json.loads(path.read_text()))
        for path in sorted((folder / "logs").rglob("keras_paragrad.json"))
    ]
    assert {summary.run.worker for summary in summaries} == {0}
    assert len(list((folder / "logs").rglob("*.xplane.pb"))) == len(summaries)
    assert second.windows == 0
    assert [*first.logged, *second.logged].count(FIRST_WORKER_ALONE) == 1
    check_workers(folder / "logs", summaries, per_call)
    return [[step.step for step in summary.steps] for summary in summaries], first.printed


def check_workers(log_dir, summaries, per_call):
    """All workers timed the last window, and what the first one waits is what its trace has of collectives."""
    first, second = read_workers(log_dir, 2)
    traced = [step.step for step in summaries[-1].steps]
    assert first.batches.tolist() == second.batches.tolist() == traced
    durations = sum(step.duration for step in summaries[-1].steps)
    assert first.milliseconds.sum() == pytest.approx(durations, rel=0.1)
    assert np.median(second.own) > np.median(first.own)
    if per_call == 1:
        collectives = np.median([step.collective for step in summaries[-1].steps])
        assert np.median(first.waiting) == pytest.approx(collectives, rel=0.5)
    assert workers_blocks((first, second))[0]["text"][0].startswith("Worker 1")


@pytest.mark.long
def test_the_first_worker_is_traced(tmp_path):
    found, printed = trained(tmp_path, 1)
    # The last two of three windows.
    assert found == [list(range(16, 24)), list(range(25, 33))]
    assert printed.count("Profile of batches") == 3
    assert json.loads((tmp_path / "logs" / "run.json").read_text())["replicas"] == 2


# In one process, test_several_batches_in_a_call of test_tracer.py has such windows.
@pytest.mark.long
def test_with_several_batches_in_a_call(tmp_path):
    found, _ = trained(tmp_path, 4)
    # Windows begin with a call; 33 batches end with a call of one.
    assert found == [list(range(16, 24)), list(range(28, 33))]
