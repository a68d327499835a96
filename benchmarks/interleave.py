"""Trainings that take turns every few steps, so that all of them are slowed alike by what else the machine does."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np

# Blocks before those that count, as they compile.
COMPILING = 3
# Trains for a number of steps, with a callback that comes before all others.
Train = Callable[[keras.callbacks.Callback, int], object]


class Turn(keras.callbacks.Callback):
    """Lets a training run a block of steps at a time, in turns with others, and takes the time of each block.

    The first of a training's callbacks, so that what the others do before and after a batch is in the time.

    Args:
        block: How many steps there are in a block.
        mine: The semaphore that is released when it is this training's turn.
        following: The semaphore of the next training.

    Attributes:
        took: The microseconds per step in each block.
    """

    def __init__(self, block: int, mine: threading.Semaphore, following: threading.Semaphore):
        super().__init__()
        self.block, self.mine, self.following = block, mine, following
        self.began: float | None = None
        self.took: list[float] = []

    def on_train_batch_begin(self, batch, logs=None):
        """Passes the turn on, if a block is over."""
        if batch % self.block:
            return
        if self.began is not None:
            self.took.append((time.perf_counter() - self.began) / self.block * 1e6)
        self.following.release()
        self.mine.acquire()
        self.began = time.perf_counter()


def in_turns(trainings: dict[str, Train], blocks: int, block: int = 32) -> dict[str, np.ndarray]:
    """Times the steps of trainings that run by turns, each in a separate thread.

    Args:
        trainings: By name, a function that trains in one epoch.
        blocks: How many blocks of each count.
        block: How many steps there are in a block.

    Returns:
        By name, the microseconds per step in each block. Blocks at the same index ran one after the other.
    """
    semaphores = [threading.Semaphore(0) for _ in trainings]
    turns = [Turn(block, mine, semaphores[(at + 1) % len(semaphores)]) for at, mine in enumerate(semaphores)]

    def run(turn: Turn, train: Train) -> None:
        turn.mine.acquire()
        try:
            # The last block ends as one more step begins.
            train(turn, block * (COMPILING + blocks) + 1)
        finally:
            turn.following.release()

    with ThreadPoolExecutor(len(turns)) as threads:
        running = [threads.submit(run, turn, train) for turn, train in zip(turns, trainings.values(), strict=True)]
        semaphores[0].release()
    for each in running:
        each.result()
    return {name: np.array(turn.took[COMPILING:]) for turn, name in zip(turns, trainings, strict=True)}
