"""The gradients of single examples in JAX, by `vmap(grad)`; see `per_example.py`, which runs this.

Prints a JSON line for each way and model: how many times the plain batch gradient it takes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from harness import fashion_mnist
from peers.ratios import print_ratios

CLIP_NORM = 1.0
WORDS, TOKENS, WIDTH, HEADS, INNER = 1000, 32, 64, 4, 128


class Weights:
    """Draws weights."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def kernel(self, *shape):
        drawn = self.generator.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))
        return jnp.asarray(drawn.astype("float32"))

    def layer(self, *shape):
        """A kernel and the bias of its last axis."""
        return self.kernel(*shape), jnp.zeros(shape[-1])


def dense(weights, inputs):
    kernel, bias = weights
    return inputs @ kernel + bias


def convolution(weights, images, padding):
    kernel, bias = weights
    order = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (2, 2), padding, dimension_numbers=order) + bias


def pooled(images):
    return jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


def normalized(weights, inputs):
    scale, offset = weights
    centred = inputs - inputs.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(inputs.var(-1, keepdims=True) + 1e-3) * scale + offset


def mlp(draw):
    images, classes = fashion_mnist(128)

    def predict(weights, x):
        for layer in weights[:-1]:
            x = jax.nn.relu(dense(layer, x))
        return dense(weights[-1], x)

    return predict, [draw.layer(784, 512), draw.layer(512, 512), draw.layer(512, 10)], images.reshape(128, 784), classes


def cnn(draw):
    images, classes = fashion_mnist(128)

    def predict(weights, x):
        first, second, hidden, last = weights
        x = pooled(jax.nn.relu(convolution(first, x, "SAME")))
        x = pooled(jax.nn.relu(convolution(second, x, "VALID")))
        return dense(last, jax.nn.relu(dense(hidden, x.reshape(len(x), -1))))

    layers = [draw.layer(8, 8, 1, 16), draw.layer(4, 4, 16, 32), draw.layer(512, 32), draw.layer(32, 10)]
    return predict, layers, images, classes


def transformer(draw):
    tokens = draw.generator.integers(0, WORDS, (32, TOKENS))
    weights = {name: draw.layer(WIDTH, WIDTH) for name in ("query", "key", "value", "output")}
    weights |= {name: (jnp.ones(WIDTH), jnp.zeros(WIDTH)) for name in ("first_norm", "second_norm")}
    weights |= {"wide": draw.layer(WIDTH, INNER), "narrow": draw.layer(INNER, WIDTH), "last": draw.layer(WIDTH, 10)}
    weights["embedding"] = draw.kernel(WORDS, WIDTH)

    def predict(weights, x):
        embedded = weights["embedding"][x]
        heads = (*embedded.shape[:-1], HEADS, WIDTH // HEADS)
        query, key, value = (dense(weights[name], embedded).reshape(heads) for name in ("query", "key", "value"))
        attention = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query, key) / np.sqrt(heads[-1]))
        attended = jnp.einsum("bhts,bshk->bthk", attention, value).reshape(embedded.shape)
        x = normalized(weights["first_norm"], embedded + dense(weights["output"], attended))
        forward = dense(weights["narrow"], jax.nn.relu(dense(weights["wide"], x)))
        return dense(weights["last"], normalized(weights["second_norm"], x + forward).mean(1))

    return predict, weights, tokens, draw.generator.integers(0, 10, 32)


def ways(predict, x, y):
    """The plain batch gradient, and the functions compared with it; all of the weights."""
    x, y = jnp.asarray(x), jnp.asarray(y)

    def losses(weights, x, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(predict(weights, x)), y[:, None], 1)[:, 0]

    def gradient_of_one(weights, x, y):
        return jax.grad(lambda weights: losses(weights, x[None], y[None])[0])(weights)

    def gradients(weights):
        return jax.vmap(gradient_of_one, (None, 0, 0))(weights, x, y)

    def norms(found):
        return jnp.sqrt(sum(jnp.square(each).reshape(len(x), -1).sum(1) for each in jax.tree.leaves(found)))

    def clipped(weights):
        found = gradients(weights)
        counts = jnp.minimum(1.0, CLIP_NORM / norms(found)) / len(x)
        return jax.tree.map(lambda each: jnp.tensordot(counts, each, 1), found)

    return {
        "plain": jax.grad(lambda weights: losses(weights, x, y).mean()),
        "gradients: JAX vmap(grad)": gradients,
        "norms: JAX vmap(grad)": lambda weights: norms(gradients(weights)),
        "clipped: JAX vmap(grad)": clipped,
    }


def main():
    for model in (mlp, cnn, transformer):
        predict, weights, x, y = model(Weights())
        compiled = {way: jax.jit(function) for way, function in ways(predict, x, y).items()}
        print_ratios(
            model.__name__,
            "on",
            {way: lambda f=f, w=weights: jax.block_until_ready(f(w)) for way, f in compiled.items()},
        )


if __name__ == "__main__":
    main()
