"""State that is saved with the object that holds it."""

import contextlib

import keras
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable


class SavedVariables(KerasSaveable, tf.__internal__.tracking.AutoTrackable):
    """Named variables that are saved with the object that holds them, in Keras's files and in TensorFlow's.

    Attributes:
        variables: The variables, by their names.
        counterparts: By the `id` of a variable, the variable of the model that it is for.
    """

    counterparts: dict[int, keras.Variable]
    loads: int

    def __init__(self):
        self.variables: dict[str, keras.Variable] = {}
        # Bypass TensorFlow's tracking.
        self.__dict__.update(counterparts={}, loads=0)

    def _obj_type(self):
        return "Operation"

    def add(self, name: str, shape=(), dtype="float32", *, aggregation="none", local=False, like=None):
        """Adds a variable of zeros.

        Args:
            name: What the variable is saved as.
            shape: Its shape.
            dtype: Its dtype.
            aggregation: How replicas' values become one: `"none"`, `"sum"` or `"mean"`.
            local: Whether every replica keeps a value of its own, combined when it is read from outside.
            like: The variable of the model that it is for, on whose device to place it.

        Returns:
            The `keras.Variable`.
        """
        strategy = tf.distribute.get_strategy()
        colocated = strategy.extended.colocate_vars_with(like.value) if like is not None else contextlib.nullcontext()
        with colocated:
            variable = keras.Variable(
                initializer="zeros",
                shape=shape,
                dtype=dtype,
                trainable=False,
                aggregation=aggregation,
                synchronization="on_read" if local else "auto",
                name=name,
            )
        self.variables[name] = variable
        if like is not None:
            vars(self)["counterparts"][id(variable)] = like
        return variable

    @property
    def restored(self) -> tuple[int, int]:
        """Changes whenever the variables are read from a file of Keras's or TensorFlow's."""
        return self.loads, getattr(self, "_update_uid", 0)

    def save_own_variables(self, store):
        """Writes each variable under its name, summed or averaged over the replicas."""
        for name, variable in self.variables.items():
            store[name] = variable.numpy()

    def load_own_variables(self, store):
        """Reads what `save_own_variables` wrote; zeros where nothing was written."""
        self.__dict__["loads"] += 1
        for name, variable in self.variables.items():
            value = store[name] if name in store else keras.ops.zeros(variable.shape, variable.dtype)
            variable.assign(value)
