"""`DistributedFit.fit` on models that do something with the data themselves."""

import keras
import numpy as np
import pytest
from sample_models import hub_task
from workers import consistency_worker

from keras_paragrad import DistributedFit

pytestmark = [
    pytest.mark.own_process(seconds=240),
    # Keras says it of every dataset that a model's own `fit` hands on.
    pytest.mark.filterwarnings("ignore:.*shuffle=True.* was passed, but will be ignored:UserWarning"),
]


def mirrored(**options):
    return DistributedFit(strategy="mirrored", devices=["CPU:0", "CPU:1"], **options)


@pytest.mark.long
def test_a_model_that_reads_its_data_itself_trains_as_one_device():
    alone = consistency_worker.pipeline()
    expected = consistency_worker.results_of_pipeline(alone.fit, alone)
    dist = mirrored()
    with dist.scope():
        made = consistency_worker.pipeline()
    found = consistency_worker.results_of_pipeline(lambda *data, **options: dist.fit(made, *data, **options), made)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.long
def test_what_can_not_reach_its_data_is_refused():
    for options, arguments, says in (({}, {"seed": 1, "prefetch": 2}, "without seed=, prefetch="),):
        dist = mirrored(**options)
        with dist.scope():
            made = consistency_worker.pipeline()
        with pytest.raises(ValueError, match=r"Pipeline overrides `fit`. Write dist.prepare\(model\)") as caught:
            dist.fit(made, *consistency_worker.data(), **arguments)
        assert says in str(caught.value)
    dist = mirrored()
    with dist.scope():
        made = consistency_worker.pipeline()
        plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"Write model.compile\(...\)"):
        dist.fit(plain, object())
    sharded = dist.dataset(*consistency_worker.data(), batch_size=16)
    with pytest.raises(ValueError, match=r"keras.Model.fit\(model, data\)"):
        dist.fit(made, sharded)
    dist.prepare(made)
    assert len(keras.Model.fit(made, sharded, epochs=2, verbose=0).history["loss"]) == 2


# In `make test`, the model above does what they do.
@pytest.mark.long
@pytest.mark.parametrize("preprocessed", [True, False], ids=["preprocessor=None", "with a preprocessor"])
def test_tasks_of_keras_hub_train_as_on_one_device(preprocessed):
    pytest.importorskip("keras_hub")
    pytest.importorskip("tensorflow_text")
    hub_task.assert_same(hub_task.trained(mirrored(), preprocessed), hub_task.trained(None, preprocessed))
