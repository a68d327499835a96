"""Updates of clipped examples, against a loop over them."""

import keras
import numpy as np

from gpu_parts.case import Cases, Line, Machine, check
from gpu_parts.models import data_for, difference, loss, made
from gpu_parts.right import LIMIT, OF_ALL
from gpu_parts.right_examples import ROWS, norms_of, of_each
from keras_paragrad import wrap

cases = Cases()


@cases("wrap, clipped: {}", variants=OF_ALL)
def clips(machine: Machine, name: str, jit: bool) -> Line:
    model = made(name)
    expected = of_each(model)
    norms = norms_of(expected)
    bound = float(np.median(norms))
    factors = np.minimum(1, bound / norms) / ROWS
    stepped = [
        weight - np.tensordot(factors, each, 1)
        for weight, each in zip([v.numpy() for v in model.trainable_variables], expected, strict=True)
    ]
    wrapped = wrap(model, clip_norm=bound)
    wrapped.compile(keras.optimizers.SGD(1.0), loss(), jit_compile=jit)
    x, y, weights = data_for(model, ROWS)
    wrapped.fit(x, y, ROWS, verbose=0, sample_weight=weights)
    return check(difference([v.numpy() for v in model.trainable_variables], stepped), LIMIT)
