"""`int` and `float` of a model's variables on replicas, which Keras's callbacks and many scripts call."""

import keras
import pytest

from keras_paragrad import DistributedFit


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_numbers_of_variables_on_replicas(shard):
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], shard=shard, min_shard_bytes=1)
    with dist.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.25, momentum=0.9), "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()
        mean.update_state([1.0, 2.0, 6.0])
    for variable, value in [(model.optimizer.iterations, 0), (model.optimizer.learning_rate, 0.25), (mean.total, 9)]:
        assert (int(variable), float(variable), f"{float(variable):.2f}") == (int(value), value, f"{value:.2f}")
        assert variable.numpy() == keras.ops.convert_to_numpy(variable) == value
    slot = model.optimizer.variables[-1]
    assert slot.numpy().tolist() == [0.0]
    with pytest.raises(TypeError, match="scalar"):
        float(slot)
