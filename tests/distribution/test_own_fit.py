"""`DistributedFit.fit` on models that do something with the data themselves."""

import alike_worker
import keras
import numpy as np
import pytest

from keras_paragrad import DistributedFit

pytestmark = [
    pytest.mark.own_process(seconds=240),
    # Keras says it of every dataset that a model's own `fit` hands on.
    pytest.mark.filterwarnings("ignore:.*shuffle=True.* was passed, but will be ignored:UserWarning"),
]


def mirrored(**options):
    return DistributedFit(strategy="mirrored", devices=["CPU:0", "CPU:1"], **options)


def test_a_model_that_reads_its_data_itself_trains_as_one_device():
    alone = alike_worker.pipeline()
    expected = alike_worker.results_of_pipeline(alone.fit, alone)
    dist = mirrored()
    with dist.scope():
        made = alike_worker.pipeline()
    found = alike_worker.results_of_pipeline(lambda *data, **options: dist.fit(made, *data, **options), made)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_what_can_not_reach_its_data_is_refused():
    for options, arguments, says in (
        ({}, {"cache": True}, "without cache="),
        ({}, {"seed": 1, "prefetch": 2}, "without seed=, prefetch="),
        ({"batch": "per_replica"}, {}, 'batch="per_replica"'),
    ):
        dist = mirrored(**options)
        with dist.scope():
            made = alike_worker.pipeline()
        with pytest.raises(ValueError, match=r"Pipeline has a `fit` of its own. Write dist.prepare\(model\)") as caught:
            dist.fit(made, *alike_worker.data(), **arguments)
        assert says in str(caught.value)
    dist = mirrored()
    with dist.scope():
        made = alike_worker.pipeline()
        plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"Write model.compile\(...\)"):
        dist.fit(plain, object())
    cut_up = dist.dataset(*alike_worker.data(), batch_size=16)
    with pytest.raises(ValueError, match=r"keras.Model.fit\(model, data\)"):
        dist.fit(made, cut_up)
    dist.prepare(made)
    assert len(keras.Model.fit(made, cut_up, epochs=2, verbose=0).history["loss"]) == 2


def classifier(keras_hub, preprocessor):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=9,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        max_sequence_length=6,
        dropout=0.0,
    )
    made = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0)
    made.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


@pytest.mark.parametrize("preprocessed", [True, False], ids=["preprocessor=None", "with a preprocessor"])
def test_tasks_of_keras_hub_train_as_on_one_device(preprocessed):
    keras_hub = pytest.importorskip("keras_hub")
    pytest.importorskip("tensorflow_text")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "day"]
    texts = ["good film", "bad film", "good day", "bad bad day", "film", "day good", "bad"] * 3
    labels = np.arange(len(texts)) % 2

    def preprocessor():
        tokenizer = keras_hub.models.BertTokenizer(vocabulary=words)
        return keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=6)

    found = []
    for dist in (None, mirrored()):
        own = None if preprocessed else preprocessor()
        x = {name: np.asarray(each) for name, each in preprocessor()(texts).items()} if preprocessed else texts
        with dist.scope() if dist else keras.name_scope("alone"):
            made = classifier(keras_hub, own)
        options = {"batch_size": 4, "epochs": 2, "verbose": 0, "validation_data": (x, labels)}
        history = dist.fit(made, x, labels, **options) if dist else made.fit(x, labels, **options)
        found.append((history.history, made.get_weights(), made.predict(x, batch_size=4, verbose=0)))
    (expected, weights, predicted), (history, others, predictions) = found
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    scale = np.sqrt(sum(np.square(each).sum() for each in weights))
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(predictions, predicted, atol=1e-5)
