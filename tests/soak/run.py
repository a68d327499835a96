"""Trains with workers that are killed at random, again and again, and holds the end to undisturbed training.

    make soak                      # 30 minutes
    make soak MINUTES=8 SEED=4     # the same kills again, as far as the machine's speed allows

A round trains in one of the ways of `WAYS`: workers on 127.0.0.1 back up every few batches; one of them, drawn at
random, gets SIGKILL or SIGTERM, when it starts, while it trains or as it ends; then all start again. The last start of
a round is left alone. In other rounds machines come and go, by `launch --nodes 1:3`: launchers and workers are killed,
told to leave, suspended, and started again. The weights, the history and the number of updates have to be those of one
process that nothing disturbed; of private training, so has the ledger. The exit status is 1 if they aren't, and what
was printed is kept. `--record FILE` saves the table as JSON.
"""

import argparse
import collections
import functools
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
from runner import own_process
from soak.worlds import Machines

ROWS, FEATURES, CLASSES, BATCH_SIZE, EPOCHS, EVERY = 397, 16, 4, 10, 3, 7
# A share of the largest weight. Over 120 updates, momentum sums the rounding of other orders of addition: undisturbed
# trainings are up to 1e-6 apart, with a median of 1e-7. Another batch changes weights by thousands of times as much.
TOLERANCE = 2e-6
# Until one that is left behind notices that another is gone, and until a whole training ends, on a busy machine.
NOTICED, ENDED = 90, 400
# After which it stops.
FAILURES = 5
# What workers print when `fit` has returned. Weights in shards are then read from all of them.
FITTED = "fit has returned"


class Way(NamedTuple):
    """A way to train, and by how many workers."""

    kind: str
    workers: int
    kills: int


WAYS = {
    "windows": Way("windows", workers=2, kills=4),
    "shards": Way("shards", workers=2, kills=4),
    "private": Way("private", workers=2, kills=4),
    "same bits": Way("windows, same bits", workers=2, kills=4),
}
# Once, as they share two cores.
FOUR = Way("windows", workers=4, kills=2)
# What three machines that come and go train, and how often one is disturbed.
WORLDS = ("windows, same bits", "whole", "shards, same bits", "windows", "shards", "private", "adversarial")
DISTURBANCES = 6


def trained(kind: str, folder: str | None, pace: float = 0.02) -> dict[str, Any]:
    """Trains, with backups in the folder if there is one, and returns what is compared."""
    import keras
    from sample_models import step_models

    from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, make_private

    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, FEATURES)).astype("float32"), draw.integers(0, CLASSES, ROWS)
    data: tuple[Any, ...] = (x, y)
    # Deterministic training has the same bits in any world: the weights, with dropout, and the history.
    kind, _, same_bits = kind.partition(", ")
    determinism = {"deterministic": bool(same_bits)}
    shard = "parameters" if kind == "shards" else None
    dist = DistributedFit(shard=shard, **determinism) if folder else DistributedFit("none", **determinism)
    keras.utils.set_random_seed(1)
    callbacks, options = [], {"batch_size": BATCH_SIZE}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with dist.scope():
        if kind == "adversarial":
            model = step_models.Gan()
            model.built = True
            model.compile(keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.05, momentum=0.9))
            data = ((x.reshape(ROWS, 4, 4, 1), x[:, :3]),)
        else:
            hidden = [keras.layers.Dense(256, activation="tanh"), *([keras.layers.Dropout(0.3)] if same_bits else [])]
            model = keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES)])
        if kind == "private":
            privacy = {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-4, "seed": 3}
            model = make_private(model, expected_batch_size=BATCH_SIZE, **privacy)
            options = {}
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        elif kind == "windows":
            # With its usual epsilon, Adam magnifies the rounding of gradients that are next to nothing.
            adam = keras.optimizers.Adam(0.003, epsilon=1e-3, use_ema=True, global_clipnorm=0.5)
            model.compile(AccumulatingOptimizer(adam, 3, tail="carry"), loss, metrics=["accuracy"])
            callbacks = [ExactAccumulation()]
        elif kind != "adversarial":
            clips = {"clipvalue": 0.01} if same_bits else {"global_clipnorm": 1.0}
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **clips)
            model.compile(optimizer, loss, metrics=["accuracy"])
    if folder:
        # As a step of a real model takes longer than this one's, so that most kills are of one that trains.
        waits = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(pace))
        callbacks += [waits, *dist.callbacks(folder, every=EVERY)]
    history = dist.fit(model, *data, epochs=EPOCHS, callbacks=callbacks, verbose=0, **options)
    print(FITTED, flush=True)
    optimizer = model.optimizers[1] if kind == "adversarial" else model.optimizer
    return {
        "weights": [np.asarray(weight) for weight in model.get_weights()],
        "history": history.history,
        "updates": int(optimizer.iterations.numpy()),
        "ledger": model.privacy.updates if kind == "private" else 0,
    }


def undisturbed(kind: str) -> dict[str, Any]:
    """In one process, without backups."""
    return trained(kind, None)


def work(task: dict[str, Any]) -> None:
    """Trains as one of several workers, and leaves the result in a file."""
    found = trained(task["kind"], task["backups"], task.get("pace", 0.02))
    weights = {f"weight {number:03}": weight for number, weight in enumerate(found.pop("weights"))}
    history = {f"history {name}": values for name, values in found.pop("history").items()}
    np.savez(task["result"], **weights, **history, **found)


def comparable(found: dict[str, Any]) -> dict[str, np.ndarray]:
    """As `work` writes it."""
    weights = {f"weight {number:03}": weight for number, weight in enumerate(found["weights"])}
    history = {f"history {name}": np.asarray(values) for name, values in found["history"].items()}
    return {**weights, **history, **{name: np.asarray(found[name]) for name in ("updates", "ledger")}}


def largest_difference(kind: str, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference: of weights as a share of the largest, and of what `fit` returned, of each list's largest.

    Raises:
        AssertionError: It is too large; or integers differ: numbers of updates, or the ledger.
    """
    assert found.keys() == expected.keys(), f"{sorted(found)} instead of {sorted(expected)}"
    floats = [name for name, value in expected.items() if np.issubdtype(value.dtype, np.floating)]
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{name}: {found[name].shape} instead of {value.shape}"
        assert name in floats or np.array_equal(found[name], value), f"{name}: {found[name]} instead of {value}"
    largest = {name: float(np.abs(expected[name]).max()) for name in floats}
    weight = max(largest[name] for name in floats if name.startswith("weight"))
    scales = {name: weight if name.startswith("weight") else largest[name] for name in floats}
    off = max(float(np.abs(found[name] - expected[name]).max()) / scales[name] for name in floats)
    assert off <= (0.0 if "same bits" in kind else TOLERANCE), f"the end differs by {off:.1e} of the largest weight"
    return off


class Round:
    """One training by workers, over as many starts as it takes."""

    def __init__(self, way: Way, folder: Path, draw: random.Random, seen: collections.Counter[str]):
        self.way, self.folder, self._draw, self._seen = way, folder, draw, seen
        folder.mkdir(parents=True)
        self.said: list[str] = []
        self.starts = 0

    @property
    def sizes(self) -> list[int]:
        """How many workers each start had."""
        return [self.way.workers] * self.starts

    def run(self, expected: dict[str, np.ndarray]) -> float:
        """Trains until it is done, and returns how far its end is from what is expected.

        Raises:
            AssertionError: A worker ended otherwise than it should have, or with something else.
        """
        done = False
        while not done:
            assert self.starts < 3 * self.way.kills, "no end after so many starts"
            done = self._start(kill=self.starts < self.way.kills)
        assert not list(self.folder.glob("backups/*")), "backups are left"
        results = [dict(np.load(self.folder / f"{worker}.npz")) for worker in range(self.way.workers)]
        return max(largest_difference(self.way.kind, result, expected) for result in results)

    def _start(self, kill: bool) -> bool:
        """Starts all workers, kills one perhaps, and returns whether training is done."""
        self.starts += 1
        outputs = [self.folder / f"start-{self.starts}-worker-{worker}.txt" for worker in range(self.way.workers)]
        tasks = [
            {
                "kind": self.way.kind,
                "backups": str(self.folder / "backups"),
                "result": str(self.folder / f"{worker}.npz"),
            }
            for worker in range(self.way.workers)
        ]
        environments = own_process.environments_of_workers(self.way.workers)
        started = zip(tasks, environments, outputs, strict=True)
        processes = [own_process.start(work, *each) for each in started]
        victim = None
        try:
            if kill:
                victim, number = self._kill(processes)
            self._wait(processes, NOTICED if victim is not None else ENDED)
        finally:
            late = [index for index, process in enumerate(processes) if process.is_alive()]
            for process in processes:
                process.kill()
                process.join()
        statuses = [process.exitcode for process in processes]
        if statuses == [0] * self.way.workers:
            return True
        assert victim is not None, f"nobody was killed, but the workers ended with {statuses}, late: {late}"
        for index, status in enumerate(statuses):
            # One that waits for another to come up is the launcher's to end.
            self._seen[self._end_of(index, status, outputs[index], index == victim, number, index in late)] += 1
        return False

    def _kill(self, processes: list[Any]) -> tuple[int | None, signal.Signals]:
        """Ends one of the processes at some time, unless all have ended by then."""
        victim = self._draw.randrange(len(processes))
        number = self._draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        seconds = self._draw.uniform(2, 25)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            time.sleep(0.1)
        if not processes[victim].is_alive():
            return None, number
        os.kill(processes[victim].pid, number)
        self.said.append(f"{number.name} to worker {victim} after {seconds:.0f} s")
        return victim, number

    @staticmethod
    def _wait(processes: list[Any], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))

    @staticmethod
    def _end_of(worker: int, status: int, output: Path, killed: bool, number: signal.Signals, late: bool) -> str:
        """How a worker has ended, in words.

        Raises:
            AssertionError: As it should not have.
        """
        printed = output.read_text(errors="replace")
        if killed and status == -number:
            return f"killed by {number.name}"
        if status == 143:
            return "stopped together, with a backup"
        if "WorkerLostError" in printed:
            return "said that another worker is lost"
        if "could not create the model's variables" in printed:
            return "said, as it built the model, that another has died"
        if "did not connect to the first worker" in printed:
            return "said, as it started, that another isn't there"
        if FITTED in printed:
            return "lost another after fit, as it read weights"
        if status == 0:
            return "was done"
        if late:
            return "still waited for the other, and was ended"
        raise AssertionError(f"worker {worker} ended with {status}:\n{printed[-3000:]}")


def work_in_world(task: dict[str, Any]) -> None:
    """Trains as one of as many workers as there are."""
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    work({**task, "result": f"{task['result']}-{index}.npz"})


def train_round(number: int, folder: Path, draw: random.Random, seen: collections.Counter[str]) -> Any:
    """One training, with its name: by workers of which some are killed, or by machines that come and go."""
    ways = list(WAYS)
    if number % 2:
        kind = WORLDS[number // 2 % len(WORLDS)]
        where = folder / f"{number:03}-{kind.replace(', ', '-').replace(' ', '-')}"
        compare = functools.partial(largest_difference, kind)
        return f"{kind}, machines", Machines(kind, where, draw, DISTURBANCES, compare)
    turn = number // 2
    name = "four" if turn == len(ways) else ways[(turn - (turn > len(ways))) % len(ways)]
    way = FOUR if name == "four" else WAYS[name]
    return f"{way.kind}, {way.workers} workers", Round(
        way, folder / f"{number:03}-{name.replace(' ', '-')}", draw, seen
    )


def main() -> int:
    """Trains until the time is over, says what each round came to, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--record", type=Path, help="a file for the table, as JSON")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work_in_world(given.work)
        return 0
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"Seed {seed}, {given.minutes:g} minutes, in {folder}", flush=True)
    draw, seen = random.Random(seed), collections.Counter[str]()
    kinds = sorted({*WORLDS, *(way.kind for way in WAYS.values())})
    expected = {kind: comparable(own_process.call(undisturbed, kind, [{}], ENDED)[0]) for kind in kinds}
    deadline = time.monotonic() + 60 * given.minutes
    rounds, failed, table = 0, 0, dict[str, dict[str, Any]]()
    while time.monotonic() < deadline and failed < FAILURES:
        name, training = train_round(rounds, folder, draw, seen)
        began, found = time.monotonic(), None
        rounds += 1
        try:
            found = training.run(expected[name.rpartition(",")[0]])
            said = f"weights and history differ by {found:.0e}"
        except AssertionError as error:
            failed += 1
            said = f"FAILED, see {training.folder}: {error}"
        seconds, worlds = time.monotonic() - began, training.sizes
        print(f"{name}, {seconds:.0f} s, worlds {worlds} ({'; '.join(training.said) or 'no kill'}): {said}", flush=True)
        row = table.setdefault(
            name, {"": name, "trainings": 0, "failed": 0, "disturbances": 0, "worlds": 0, "error": 0.0}
        )
        row["trainings"] += 1
        row["failed"] += found is None
        row["disturbances"] += len(training.said)
        row["worlds"] += len(worlds)
        row["error"] = max(row["error"], found or 0.0)
        if found is not None:
            shutil.rmtree(training.folder)
    rows = list(table.values())
    kills = sum(row["disturbances"] for row in rows)
    print(f"\nSeed {seed}: {rounds} trainings, {kills} disturbances, {failed} failed.")
    for row in rows:
        print(json.dumps(row))
    for how, count in seen.most_common():
        print(f"{count:4} workers: {how}")
    if given.record:
        title = f"Trainings in {given.minutes:g} minutes, and the largest difference from one device"
        given.record.write_text(json.dumps({title: rows}, indent=1) + "\n")
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
