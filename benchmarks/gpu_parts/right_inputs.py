"""Derivatives with respect to inputs, against a tape around each row, with TensorFloat-32 off."""

import numpy as np
import tensorflow as tf

from gpu_parts.case import Cases, Line, Machine, check
from gpu_parts.models import data_for, made
from gpu_parts.right import LIMIT
from keras_paragrad import input_jacobian

ROWS = 6
MODES = {
    f"{mode}{suffix}, {name}": {"name": name, "mode": mode, "jit": jit}
    # XLA may compute what max-pooling compares twice, with other rounding, and forward mode is refused then.
    for name, mode in (("MLP", "forward"), ("MLP", "reverse"), ("CNN", "reverse"))
    for suffix, jit in (("", False), (", XLA", True))
}
cases = Cases()


@cases("input_jacobian, {}", variants=MODES)
def jacobians(machine: Machine, name: str, mode: str, jit: bool) -> Line:
    model = made(name)
    x, _, _ = data_for(model, ROWS)
    expected = []
    for row in x:
        watched = tf.constant(row[np.newaxis])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(watched)
            entries = tf.unstack(model(watched, training=False)[0])
        expected.append(np.stack([tape.gradient(entry, watched)[0] for entry in entries]))
    found = input_jacobian(model, x, mode=mode, jit_compile=jit)
    return check(float(np.abs(found - expected).max() / np.abs(expected).max()), LIMIT, "of the largest entry")
