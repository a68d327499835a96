"""The gradients of single examples in PyTorch: Opacus, torch.func and BackPACK; see `per_example.py`, which runs this.

Prints a JSON line for each way and model: how many times the plain batch gradient it takes.
"""

import copy
import warnings

import numpy as np
import torch
from backpack import backpack, extend
from backpack.extensions import BatchGrad
from harness import fashion_mnist
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from peers.ratios import print_ratios
from torch import nn
from torch.func import functional_call, grad, vmap

CLIP_NORM = 1.0
WORDS, TOKENS, WIDTH, HEADS, INNER = 1000, 32, 64, 4, 128
warnings.filterwarnings("ignore")


class Block(nn.Module):
    """A transformer block on an embedding, and a dense layer on its mean."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow, self.last = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, tokens):
        x = self.embedding(tokens)
        heads = (*x.shape[:-1], HEADS, WIDTH // HEADS)
        query, key, value = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attention = torch.softmax(query @ key.transpose(2, 3) / heads[-1] ** 0.5, -1)
        attended = (attention @ value).transpose(1, 2).reshape(x.shape)
        x = self.first_norm(x + self.output(attended))
        x = self.second_norm(x + self.narrow(torch.relu(self.wide(x))))
        return self.last(x.mean(1))


def mlp_layers():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def mlp():
    images, classes = fashion_mnist(128)
    return mlp_layers(), torch.tensor(images.reshape(128, 784)), torch.tensor(classes)


def cnn_layers():
    convolutions = [nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)]
    convolutions += [nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn():
    images, classes = fashion_mnist(128)
    return cnn_layers(), torch.tensor(images.reshape(128, 1, 28, 28)), torch.tensor(classes)


def transformer():
    generator = np.random.default_rng(0)
    tokens, classes = generator.integers(0, WORDS, (32, TOKENS)), generator.integers(0, 10, 32)
    return Block(), torch.tensor(tokens), torch.tensor(classes)


def backward(model, x, y):
    """The plain batch gradient; in a model with hooks, whatever they make of it."""
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()


def opacus_clipped(model, x, y):
    """Ghost clipping: one backward pass for the norms, and one for the clipped sum."""
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    losses.mean().backward(retain_graph=True)
    model.zero_grad(set_to_none=True)
    weighted = torch.sum(model.get_clipping_coef() * losses)
    model.disable_hooks()
    weighted.backward()
    model.enable_hooks()


def opacus_norms(model, x, y):
    backward(model, x, y)
    return model.get_norm_sample()


def backpack_gradients(model, criterion, x, y):
    model.zero_grad(set_to_none=True)
    with backpack(BatchGrad()):
        criterion(model(x), y).backward()


def torch_func(model, x, y):
    """A function that returns all gradients, by name."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss_of_one(weights, x, y):
        return nn.functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    gradients = vmap(grad(loss_of_one), (None, 0, 0))
    return lambda: gradients(weights, x, y)


def ways(model, x, y):
    """The plain batch gradient, and the functions compared with it; the hooks are in copies of the model."""
    hooked = GradSampleModule(copy.deepcopy(model))
    ghost = GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=CLIP_NORM)
    found = {
        "plain": lambda: backward(model, x, y),
        "gradients: torch.func": torch_func(model, x, y),
        "gradients: Opacus, hooks": lambda: backward(hooked, x, y),
        "norms: Opacus, ghost": lambda: opacus_norms(ghost, x, y),
        "clipped: Opacus, ghost": lambda: opacus_clipped(ghost, x, y),
    }
    if isinstance(model, nn.Sequential):
        # BackPACK knows no attention.
        extended, criterion = extend(copy.deepcopy(model)), extend(nn.CrossEntropyLoss())
        found["gradients: BackPACK"] = lambda: backpack_gradients(extended, criterion, x, y)
    return found


def main():
    for model in (mlp, cnn, transformer):
        torch.manual_seed(0)
        print_ratios(model.__name__, "off", ways(*model()))


if __name__ == "__main__":
    main()
