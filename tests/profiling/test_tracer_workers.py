"""Two workers: the first is traced, and says what it saw; TensorFlow's profiler would crash the other now and then."""

import json

import pytest
from runner.own_process import on_workers
from trainings.profiled import profiled_by_worker

from keras_paragrad.profiling.summary import ProfileSummary
from keras_paragrad.profiling.tracer import FIRST_WORKER_ALONE


# In one process, test_several_batches_in_a_call of test_tracer.py has windows that begin with a call; here, 33 batches
# end with a call of one.
@pytest.mark.long
@pytest.mark.parametrize(("per_call", "last"), [(1, range(25, 33)), (4, range(28, 33))])
def test_the_first_worker_is_traced(per_call, last, tmp_path):
    logs = tmp_path / "logs"
    first, second = on_workers(profiled_by_worker, (logs, per_call), seconds=240)
    summaries = [
        ProfileSummary.from_dict(json.loads(path.read_text())) for path in sorted(logs.rglob("keras_paragrad.json"))
    ]
    assert {summary.run.worker for summary in summaries} == {0}
    assert len(list(logs.rglob("*.xplane.pb"))) == len(summaries)
    assert second.windows == 0
    assert [*first.logged, *second.logged].count(FIRST_WORKER_ALONE) == 1
    # The last two of three windows.
    assert [[step.step for step in summary.steps] for summary in summaries] == [list(range(16, 24)), list(last)]
    assert first.printed.count("Profile of batches") == 3
    assert json.loads((logs / "run.json").read_text())["replicas"] == 2
