"""Applying one gradient on all replicas at once."""

import functools

import keras

from keras_paragrad._keras.capabilities import parts
from keras_paragrad._keras.replicas import run_if

_REDUCE = "_all_reduce_sum_gradients"


def apply_everywhere(run, optimizer: keras.optimizers.Optimizer, gradients, variables) -> None:
    """Applies gradients that have been summed over the replicas, on each of them; called once for all.

    Args:
        run: Runs a function on every replica; see `keras_paragrad._keras.replicas.coordinate`.
        optimizer: A built optimizer.
        gradients: A gradient or `None` for each variable, grouped by replica.
        variables: The variables that the optimizer was built with.
    """
    frequencies = [(part, part.ema_overwrite_frequency) for part in parts(optimizer)]
    before = [part.__dict__.get(_REDUCE) for part, _ in frequencies]
    for part, _ in frequencies:
        part.__dict__[_REDUCE] = list
        # Keras overwrites in a branch on each replica, and a strategy refuses to update a variable in there.
        part.ema_overwrite_frequency = None
    try:
        run(lambda gradients: optimizer.apply(gradients, variables), gradients)
    finally:
        for (part, frequency), replaced in zip(frequencies, before, strict=True):
            part.ema_overwrite_frequency = frequency
            if replaced is None:
                del part.__dict__[_REDUCE]
            else:
                part.__dict__[_REDUCE] = replaced
    for part, frequency in frequencies:
        if part.use_ema and frequency and part.built:
            run_if(part.iterations % frequency == 0, functools.partial(_overwrite_with_average, run, part))


def _overwrite_with_average(run, optimizer: keras.optimizers.Optimizer) -> None:
    variables = optimizer._trainable_variables

    def constrain():
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    optimizer._overwrite_model_variables_with_average_value(variables)
    run(constrain)
