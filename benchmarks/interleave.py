"""Trainings that take turns every few steps, so that what else the machine does is the same for all of them."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np

# Blocks before those that count, as they compile.
COMPILING = 3
# Trains so many steps with a callback before all others.
Train = Callable[[keras.callbacks.Callback, int], object]


class Turn(keras.callbacks.Callback):
    """Lets a training run a block of steps at a time, in turns with others, and takes the time of each block.

    The first of a training's callbacks, so that what the others do before and after a batch is in the time.

    Args:
        block: How many steps there are in a block.
        mine: The semaphore that says that it is this training's turn.
        following: That of the next one.
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
    """Takes the time of trainings that run in turns, each in a thread of its own.

    Args:
        trainings: By name, a function that trains in one epoch.
        blocks: How many blocks of each count.
        block: How many steps there are in a block.

    Returns:
        By name, the microseconds of a step in each block, of which one follows on another's.
    """
    semaphores = [threading.Semaphore(0) for _ in trainings]
    turns = [Turn(block, mine, semaphores[(at + 1) % len(semaphores)]) for at, mine in enumerate(semaphores)]

    def run(turn: Turn, train: Train) -> None:
        turn.mine.acquire()
        try:
            train(turn, block * (COMPILING + blocks) + 1)
        finally:
            turn.following.release()

    with ThreadPoolExecutor(len(turns)) as threads:
        running = [threads.submit(run, turn, train) for turn, train in zip(turns, trainings.values(), strict=True)]
        semaphores[0].release()
    for each in running:
        each.result()
    return {name: np.array(turn.took[COMPILING:]) for turn, name in zip(turns, trainings, strict=True)}
