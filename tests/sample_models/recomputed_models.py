"""Models with a layer named "block" that is hard to run twice, and data for them."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

L = keras.layers
TOLERANCE = 1e-6


class Structured(L.Layer):
    """Takes nested arguments, keywords and a mask, and returns a structure; keeps a metric and adds a loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.dense, self.dropout, self.seen = L.Dense(8), L.Dropout(0.3), keras.metrics.Mean(name="seen")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, extra=None, factor=1.0, mask=None, training=None):
        y = self.dropout(self.dense(x)) + extra["a"] * extra["b"][0]
        if mask is not None:
            y *= keras.ops.cast(mask[..., None], y.dtype)
        if training:
            self.seen.update_state(keras.ops.mean(y))
            self.add_loss(0.01 * keras.ops.mean(y * y))
        return {"out": y, "more": [y * factor, keras.ops.shape(y)[0]], "nothing": []}


class Product(L.Layer):
    def build(self, *shapes):
        self.kernel = self.add_weight(shape=(8, 8))

    def call(self, a, b):
        return keras.ops.tanh(a @ self.kernel) * b


class Around(L.Layer):
    """Hands on no `training`: the layers in it find it in the call around."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inside = [L.Dropout(0.5), L.BatchNormalization()]

    def build(self, shape):
        self.inside[1].build(shape)

    def call(self, x):
        return self.inside[1](self.inside[0](x))


class HalfUsed(L.Layer):
    """Has a weight without a gradient, which weight decay must leave alone."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8))
        self.unused = self.add_weight(shape=(3,), initializer="ones")

    def call(self, x):
        return keras.ops.tanh(x @ self.kernel)


class Spectrum(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(8,))

    def call(self, x):
        transformed = tf.signal.fft(tf.cast(x * self.scale, "complex64"))
        return tf.math.real(transformed * transformed)


def on_numbers(block, repeat=1):
    inputs = keras.Input((8,))
    hidden = L.Dense(8)(inputs)
    for _ in range(repeat):
        hidden = block(hidden)
    return keras.Model(inputs, L.Dense(1)(hidden))


def structured():
    inputs = keras.Input((5,), dtype="int32")
    hidden = L.Embedding(10, 8, mask_zero=True)(inputs)
    found = Structured(name="block")(hidden, extra={"a": hidden, "b": [hidden]}, factor=2.0)
    return keras.Model(inputs, L.Dense(1)(L.LSTM(6)(found["out"] + found["more"][0])))


def recurrent():
    inputs, inside = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    hidden = L.Embedding(10, 8, mask_zero=True)(inside)
    hidden = L.Bidirectional(L.SimpleRNN(6, return_sequences=True, recurrent_dropout=0.2, dropout=0.2))(hidden)
    return keras.Model(inputs, L.Dense(1)(L.SimpleRNN(4)(keras.Model(inside, hidden, name="block")(inputs))))


def attention():
    inputs, inside = keras.Input((5,), dtype="int32"), keras.Input((5, 8))
    mixed = L.MultiHeadAttention(2, 4, dropout=0.2)(inside, inside)
    hidden = L.LayerNormalization()(L.Add()([inside, mixed]))
    dense = L.Dense(8, kernel_regularizer="l2", activity_regularizer="l2")
    hidden = dense(L.Dense(16, activation="gelu")(hidden))
    block = keras.Model(inside, L.Add()([inside, L.Dropout(0.1)(hidden)]), name="block")
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling1D()(block(block(L.Embedding(10, 8)(inputs))))))


def masked_attention():
    """Attention takes the mask off its input; what it makes of masked rows is used, too."""
    inputs = keras.Input((5,), dtype="int32")
    hidden = L.Embedding(10, 8, mask_zero=True)(inputs)
    mixed = L.MultiHeadAttention(2, 4, name="block")(hidden, hidden)
    return keras.Model(inputs, L.Dense(1)(keras.ops.mean(mixed, axis=1)))


def normalized(synchronized=False):
    inside = keras.Input((8,))
    hidden = L.BatchNormalization(synchronized=synchronized)(L.Dense(16)(inside))
    hidden = L.Dense(8)(L.Dropout(0.3)(L.ReLU()(hidden)))
    return on_numbers(keras.Model(inside, hidden, name="block"))


def dropped():
    inside = keras.Input((8,))
    hidden = L.Dropout(0.3)(L.Dense(16, activation="gelu", kernel_regularizer="l2")(L.LayerNormalization()(inside)))
    return on_numbers(keras.Model(inside, L.Add()([inside, L.Dense(8)(hidden)]), name="block"))


def frozen():
    inside = keras.Input((8,))
    dense = L.Dense(8, activation="tanh")
    block = keras.Model(inside, L.BatchNormalization()(dense(inside)), name="block")
    dense.trainable = False
    return on_numbers(block)


def same_tensor_twice():
    inputs = keras.Input((8,))
    block = Product(name="block")
    hidden = block(L.Dense(8)(inputs), inputs)
    return keras.Model(inputs, L.Dense(1)(block(hidden, hidden)))


def gathered():
    model = on_numbers(L.Dense(8, name="block", activation="tanh"))
    rows = L.Lambda(lambda x: tf.gather(x, tf.zeros_like(tf.shape(x)[:1])) * x)(model.layers[-2].output)
    return keras.Model(model.inputs, L.Dense(1)(rows))


def over_time():
    inputs = keras.Input((5,), dtype="int32")
    hidden = L.TimeDistributed(L.Dense(4, name="block", activation="tanh"))(L.Embedding(10, 8)(inputs))
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(hidden)))


def integers():
    inputs = keras.Input((5,), dtype="int32")
    hidden = L.Embedding(12, 8)(L.Lambda(lambda x: x + 1, name="block")(inputs))
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(hidden)))


MODELS = {
    "integers alone": integers,
    "structures, keywords, mask, metric, added loss": structured,
    "recurrent layers and masks": recurrent,
    "attention, shared, regularized": attention,
    "masked attention": masked_attention,
    "batch normalization and dropout": normalized,
    "frozen": frozen,
    "the same tensor twice": same_tensor_twice,
    "training from the call around": lambda: on_numbers(Around(name="block")),
    "a weight that is not used": lambda: on_numbers(HalfUsed(name="block")),
    "called three times": lambda: on_numbers(HalfUsed(name="block"), repeat=3),
    "the global seed": lambda: on_numbers(L.Lambda(lambda x: keras.random.dropout(x, 0.5), name="block")),
    "complex numbers": lambda: on_numbers(Spectrum(name="block")),
    "rows gathered from its output": gathered,
    "in TimeDistributed": over_time,
}


def data_for(model, rows=24):
    generator = np.random.default_rng(0)

    def drawn(tensor):
        shape = (rows, *tensor.shape[1:])
        return generator.integers(0, 10, shape) if "int" in tensor.dtype else generator.normal(size=shape).astype("f4")

    x = {each.name: drawn(each) for each in model.inputs} if len(model.inputs) > 1 else drawn(model.inputs[0])
    y = generator.normal(size=(rows, 1)).astype("float32")
    return x, {"y": y} if "y" in getattr(model, "output_names", []) else y


def sgd():
    return keras.optimizers.SGD(0.005, momentum=0.9, nesterov=True, weight_decay=0.1)


def trained(make, context, optimizer=sgd, callbacks=(), loss="mse", **options):
    """A model of seeded weights after training in a context made for it, and what it showed."""
    keras.utils.set_random_seed(1)
    model = make()
    x, y = data_for(model)
    if context is without and not options.get("jit_compile", True):
        # Six steps take less than tracing them; with XLA both are compiled, which rounds alike.
        options = {**options, "run_eagerly": True}
    model.compile(optimizer(), loss, metrics=["mae"] if loss == "mse" else None, **options)
    with context(model):
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model, history.history


def without(model):
    return contextlib.nullcontext()


def check_equal(found, expected, tolerance=TOLERANCE):
    (model, history), (reference, shown) = found, expected
    for variable, other in zip(model.variables, reference.variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=tolerance, atol=tolerance, err_msg=other.path)
    for name, values in shown.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
