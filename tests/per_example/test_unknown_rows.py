"""A model that loses the number of rows is refused, and not searched for units without end."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import per_example_norms, wrap
from keras_paragrad.privacy import make_private

layers = keras.layers
Y = np.ones((6, 1), "float32")


def by_numpy(inputs, known):
    outputs = tf.numpy_function(lambda values: values * 2, [inputs], tf.float32)
    return tf.ensure_shape(outputs, [inputs.shape[0] if known else None, 3])


class Doubling(layers.Layer):
    def __init__(self, known=False):
        super().__init__(name="doubling")
        self.known = known

    def call(self, inputs):
        return by_numpy(inputs, self.known)

    def compute_output_shape(self, shape):
        return shape


class Kept(layers.Layer):
    """Keeps the rows that a mask selects, which may be all."""

    def __init__(self):
        super().__init__(name="kept")

    def call(self, inputs):
        return tf.boolean_mask(inputs, tf.reduce_all(inputs > -1e9, axis=1))

    def compute_output_shape(self, shape):
        return shape


def model_with(layer, dtype="float32"):
    return keras.Sequential([keras.Input((3,), dtype=dtype), layer, layers.Dense(1)])


def words():
    layer = layers.TextVectorization(max_tokens=9, output_sequence_length=4, vocabulary=["a", "b"], name="words")
    table = layers.Embedding(9, 2)
    return keras.Sequential([keras.Input((), dtype="string"), layer, table, layers.Flatten(), layers.Dense(1)])


def outer(doubling):
    """The layer is in a model in a model, and after it comes one that knows the number again."""
    inner = keras.Sequential([keras.Input((3,)), doubling, layers.Dense(3)])
    known = layers.Lambda(lambda x: tf.ensure_shape(x[0], [x[1].shape[0], 3]), output_shape=(3,))
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(1)(known([inner(inputs), inputs])))


MODELS = {
    "numpy_function": lambda: model_with(Doubling()),
    "boolean_mask": lambda: model_with(Kept()),
    "between layers": lambda: Before(),
}


class Before(keras.Model):
    """Loses the number of rows before a layer."""

    def __init__(self):
        super().__init__(name="before")
        self.dense = layers.Dense(1, name="dense")

    def call(self, inputs):
        return self.dense(by_numpy(inputs, known=False))


def trained(model):
    model.compile("sgd", loss="mse")
    model.fit(np.ones((6, 3), "float32"), Y, verbose=0)


SAYS = r"The number of rows of the output of '.*dense.*' is unknown.*the layer before that loses it.*tf.ensure_shape"


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_refused(kind):
    with pytest.raises(ValueError, match=SAYS):
        trained(wrap(MODELS[kind]()))
    with pytest.raises(ValueError, match=SAYS):
        per_example_norms(MODELS[kind](), np.ones((6, 3), "float32"), Y, "mse")


def test_private_models_are_refused_too():
    private = make_private(
        model_with(Doubling()), clip_norm=1.0, expected_batch_size=3, delta=1e-2, noise_multiplier=1.0
    )
    with pytest.raises(ValueError, match=SAYS):
        trained(private)


def test_what_the_message_says_trains():
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    model = model_with(Doubling(known=True))
    trained(wrap(model))
    plain = keras.Sequential([keras.Input((3,)), layers.Rescaling(2.0), layers.Dense(1)])
    plain.set_weights(model.get_weights())
    ours, theirs = (per_example_norms(each, x, Y, "mse") for each in (model, plain))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_layer_around_it_that_knows_the_number_is_one_unit():
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    # TensorFlow has no derivative of the function, which nothing before it needs.
    model, plain = outer(Doubling()), outer(layers.Rescaling(2.0))
    plain.set_weights(model.get_weights())
    ours, theirs = (per_example_norms(each, x, Y, "mse") for each in (model, plain))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_text_within_the_model_is_refused():
    wrapped = wrap(words())
    wrapped.compile("sgd", loss="mse")
    data = tf.data.Dataset.from_tensor_slices((["a b", "b", "a"] * 2, Y)).batch(3)
    with pytest.raises(ValueError, match="The number of rows of the output of 'embedding.*' is unknown"):
        wrapped.fit(data, shuffle=False, verbose=0)
