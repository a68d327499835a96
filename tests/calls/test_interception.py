"""`apply` of an optimizer goes to whoever captures it on this thread, then to its own interceptor, then to Keras."""

import threading

import keras
import numpy as np
import pytest
from keras.src.optimizers.base_optimizer import BaseOptimizer

from keras_paragrad.engine.step.interception import capturing_applies, intercept_apply

pytestmark = pytest.mark.fast


def built():
    weight = keras.Variable(np.zeros(2, "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight])
    return optimizer, weight


def apply(optimizer, weight):
    optimizer.apply([keras.ops.ones(2)], [weight])
    return weight.numpy()[0]


def test_a_capture_comes_before_an_interceptor():
    optimizer, weight = built()
    calls = []

    def doubled(original, grads, variables):
        original([2 * each for each in grads], variables)

    intercept_apply(optimizer, doubled)
    assert apply(optimizer, weight) == -2

    def capture(captured, gradients, variables):
        calls.append(captured)
        if len(calls) == 2:
            captured.apply(gradients, variables)

    with capturing_applies(capture):
        assert apply(optimizer, weight) == -2
        # Within a handler, `apply` updates.
        assert apply(optimizer, weight) == -4
        apply(*built())
    assert len(calls) == 3
    intercept_apply(optimizer, None)
    assert "apply" not in vars(optimizer)
    assert apply(optimizer, weight) == -5


def test_an_apply_of_the_optimizer_s_own_is_restored():
    optimizer, weight = built()
    vars(optimizer)["apply"] = own = lambda grads, variables: None
    intercept_apply(optimizer, lambda original, grads, variables: original(grads, variables))
    assert apply(optimizer, weight) == 0
    intercept_apply(optimizer, None)
    assert optimizer.apply is own


def test_captures_on_several_threads_end_in_any_order():
    original = vars(BaseOptimizer)["apply"]
    optimizer, weight = built()
    entered, ended = threading.Event(), threading.Event()

    def capture():
        with capturing_applies(lambda *call: None):
            entered.set()
            ended.wait(5)

    thread = threading.Thread(target=capture)
    with capturing_applies(lambda *call: None):
        thread.start()
        entered.wait(5)
    # That of the other thread takes no call of this one.
    assert apply(optimizer, weight) == -1
    ended.set()
    thread.join()
    assert vars(BaseOptimizer)["apply"] is original
