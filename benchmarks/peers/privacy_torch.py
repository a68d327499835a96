"""Private training in PyTorch, by Opacus with ghost clipping; see `privacy.py`, which runs this.

Prints a JSON line for each model: milliseconds a plain step, and how many times that a private one takes.
"""

import json
import math
import time
import warnings

import numpy as np
import torch
from harness import fashion_mnist
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from peers.per_example_torch import Block, cnn_layers, mlp_layers
from peers.ratios import in_plain
from torch.utils.data import DataLoader, TensorDataset

UPDATES, ROUNDS, WORDS, TOKENS = 14, 7, 1000, 32
# Models, and the examples of an update.
CASES = (("mlp", 1024), ("mlp", 2048), ("mlp", 4096), ("cnn", 1024), ("transformer", 1024))
warnings.filterwarnings("ignore")


def data_of(name, size):
    rows = size * UPDATES
    if name == "transformer":
        generator = np.random.default_rng(0)
        tokens, classes = generator.integers(0, WORDS, (rows, TOKENS)), generator.integers(0, 10, rows)
        return TensorDataset(torch.tensor(tokens), torch.tensor(classes))
    images, classes = fashion_mnist(rows)
    shape = (rows, 784) if name == "mlp" else (rows, 1, 28, 28)
    return TensorDataset(torch.tensor(images.reshape(shape)), torch.tensor(classes))


def model_of(name):
    torch.manual_seed(0)
    return {"mlp": mlp_layers, "cnn": cnn_layers, "transformer": Block}[name]()


def epoch(model, optimizer, criterion, loader):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def timed(run):
    def timed_run():
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) / UPDATES * 1e3

    return timed_run


def plain(name, size):
    model, loader = model_of(name), DataLoader(data_of(name, size), batch_size=size, shuffle=True)
    optimizer, criterion = torch.optim.SGD(model.parameters(), 0.01), torch.nn.CrossEntropyLoss()
    return timed(lambda: epoch(model, optimizer, criterion, loader))


def private(name, size):
    model, loader = model_of(name), DataLoader(data_of(name, size), batch_size=size)
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.01),
        data_loader=loader,
        criterion=torch.nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=True,
        grad_sample_mode="ghost",
    )

    def run():
        # Batches are cut where they exceed it: a quarter of what is usually drawn, so that there are four of them.
        most = math.ceil((size + 2.5 * size**0.5) / 4)
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=most, optimizer=optimizer)
        with manager as batches:
            epoch(model, optimizer, criterion, batches)

    return timed(run)


def main():
    for name, size in CASES:
        milliseconds, ratios = in_plain({"plain": plain(name, size), "private": private(name, size)}, ROUNDS)
        found = {"model": name, "examples": size, "plain": milliseconds, "ratio": ratios["private"]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
