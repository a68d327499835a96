"""The models that several benchmarks train, in words and numbers; for processes that must not load TensorFlow."""

MODELS = {
    "mlp": "MLP 784-512-512-10, batch of 128",
    "cnn": "CNN of the DP tutorial on MNIST, batch of 128",
    "transformer": "transformer block, 32 x 64, batch of 32",
}
ROWS = {"mlp": 128, "cnn": 128, "transformer": 32}
WORDS, TOKENS, WIDTH = 1000, 32, 64
