"""Every public method and setting of the optimizer is the inner one's, and callbacks see updates."""

import keras
import numpy as np
import pytest
from oracles.whole_batches import largest_difference, train_on_whole_windows, windows
from sample_models.cases import DataCase, build_model

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

SETTINGS = {
    "weight_decay": 0.3,
    "clipvalue": 0.5,
    "use_ema": True,
    "ema_momentum": 0.7,
    "ema_overwrite_frequency": 3,
}


def test_settings_are_the_inner_optimizers():
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.5, **SETTINGS))
    for name, value in SETTINGS.items():
        assert getattr(optimizer, name) == value
        setattr(optimizer, name, None)
        assert getattr(optimizer.inner_optimizer, name) is None


def test_learning_rate_reads_and_sets_the_inner_one():
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.5))
    optimizer.learning_rate = 0.25
    assert optimizer.inner_optimizer.learning_rate.numpy() == 0.25
    optimizer.learning_rate.assign(0.125)
    assert optimizer.inner_optimizer.learning_rate.numpy() == 0.125
    scheduled = AccumulatingOptimizer(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 10)))
    with pytest.raises(TypeError, match="not settable"):
        scheduled.learning_rate = 0.1


def test_exclusion_from_weight_decay_is_kept():
    def trained(make):
        optimizer = make(keras.optimizers.AdamW(0.01, weight_decay=0.5))
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return build_model(lambda: optimizer)

    data = DataCase((4,) * 6)
    accumulating = trained(lambda inner: AccumulatingOptimizer(inner, 3))
    accumulating.fit(data.dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    whole = trained(lambda inner: inner)
    train_on_whole_windows(whole, windows(data.batches(), lambda _: 3, 1))
    assert largest_difference(accumulating, whole) < 1e-6


@pytest.mark.long
def test_multi_optimizer():
    def multi():
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                keras.optimizers.SGD(0.1, clipnorm=0.05), {".*/bias": keras.optimizers.Adam()}
            )
        )

    data = DataCase((3, 5, 2, 4, 1), weighted=True)
    accumulating = build_model(lambda: AccumulatingOptimizer(multi(), 2))
    accumulating.fit(data.dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    whole = build_model(multi)
    train_on_whole_windows(whole, windows(data.batches(), lambda _: 2, 1))
    assert accumulating.optimizer.iterations.numpy() == 3
    assert largest_difference(accumulating, whole) < 1e-6


def test_nothing_but_accumulators_changes_between_updates():
    model = build_model(
        lambda: AccumulatingOptimizer(keras.optimizers.AdamW(0.01, use_ema=True), 4, weighting="uniform")
    )
    data = DataCase((4,) * 8).batches()
    seen = []
    for x, y in data:
        model.train_on_batch(x, y)
        state = [v.numpy().copy() for v in (*model.trainable_variables, *model.optimizer.variables)]
        seen.append(state)
    for step in (1, 2, 5, 6):
        assert all(np.array_equal(a, b) for a, b in zip(seen[step], seen[step - 1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(seen[3], seen[2], strict=True))
