"""A Transformer in shards in PyTorch: FSDP beside DDP, on four gloo processes; see `sharding.py`, which runs this.

Prints a JSON line: bytes of weights and Adam's moments in a process, the peak memory of all processes together, and
milliseconds a step.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

PROCESSES, STEPS, WARM_UP = 4, 7, 2


class Block(nn.Module):
    """Attention and a dense network, each added to its input and normalized."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = self.first_norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.second_norm(x + self.inner(x))


class Transformer(nn.Module):
    """The model of `sharding.py`."""

    def __init__(self, words, width, blocks, heads):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.last = nn.Linear(width, 4)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean(1))


def held(tensors):
    """Bytes of this process's parts of tensors."""
    own = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in own)


def train(rank, way, sizes, meeting, results):
    """Runs in a process of its own: trains, and puts what it found into a queue."""
    processes = 1 if way == "one process" else PROCESSES
    # The cores that there are, divided among the processes.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
    torch.manual_seed(0)
    *shape, batch, tokens = sizes
    # No process makes the whole model if it holds a shard of it.
    with torch.device("meta"):
        model = Transformer(*shape)
    if way == "FSDP":
        mesh = init_device_mesh("cpu", (processes,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            nn.init.xavier_uniform_(weight)
        else:
            nn.init.constant_(weight, float(name.endswith("norm.weight")))
    if way == "DDP":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randint(0, 8, (batch // processes, tokens)), torch.arange(batch // processes) % 4
    taken = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        taken.append((time.perf_counter() - start) * 1e3)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    results.put((held([*model.parameters(), *moments]), peak, statistics.median(taken[WARM_UP:])))
    dist.destroy_process_group()


def trained(way, sizes):
    """The most that a process holds, the peaks of all processes together, and milliseconds a step."""
    context = get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (way, sizes, f"{directory}/meeting", results)
        processes = [
            context.Process(target=train, args=(rank, *arguments))
            for rank in range(1 if way == "one process" else PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{way}: a process has failed")
    found = [results.get() for _ in processes]
    held, peaks, milliseconds = zip(*found, strict=True)
    return max(held), sum(peaks), max(milliseconds)


def main():
    way, *sizes = sys.argv[1:]
    held, peak, step = trained(way, list(map(int, sizes)))
    print(json.dumps({"held": held, "peak": peak, "step": step}))


if __name__ == "__main__":
    main()
