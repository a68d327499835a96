"""What replicas and workers cost: beside stock Keras, in bytes, beside the bare collective, and after a kill.

`python benchmarks/distribution.py` prints the tables and saves them in `results/distribution.json`; `python
benchmarks/distribution.py recovery` does one of the sections `replicas`, `bytes`, `throughput` and `recovery`. Two
logical devices, or two workers, on the cores of one machine show what is added to a step, not how training scales.
"""

import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
from harness import fashion_mnist, interleaved, report


def place_in_cluster():
    """This worker's index in the cluster."""
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


# With more words than a section's name, this is one of the processes that a section starts.
if sys.argv[2:]:
    if sys.argv[1] == "throughput" and hasattr(os, "sched_setaffinity"):
        # Before TensorFlow, which starts as many threads as it sees cores.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [cores[place_in_cluster() % len(cores)]])
    import keras
    import tensorflow as tf
    from interleave import in_turns
    from models import endless

    from keras_paragrad import AccumulatingOptimizer, DistributedFit
    from keras_paragrad.distribution.checkpoint.backup import Backup

NAME = "distribution"
BATCH, STEPS, ROUNDS = 128, 50, 21
# How many steps of each of several trainings run before the next one's turn, and how often it is each one's.
BLOCK, BLOCKS = 16, 60
MODELS = {"mlp": "MLP 784-512-512-10", "cnn": "CNN of two convolutions"}
REDUCTIONS = {"one_device": "added up on one device", "ring": "added up on TensorFlow's default, a ring"}
OPTIMIZERS = ("SGD", "Adam")
ACCUMULATED = (1, 4, 16)
# Whole windows for every k, and how often they are measured.
SEGMENT, SEGMENTS = 64, 5
TRACED = 16
BACKUP_EVERY, KILLED_AT, RECOVERY_STEPS, KILLS = 10, 57, 80, 3


def model_of(name, optimizer, jit_compile=False):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    if name == "mlp":
        body = [layers.Flatten(), *(layers.Dense(512, activation="relu") for _ in range(2))]
    else:
        convolutions = [layers.Conv2D(filters, 5, strides=2, activation="relu") for filters in (16, 32)]
        body = [*convolutions, layers.Flatten(), layers.Dense(64, activation="relu")]
    model = keras.Sequential([keras.Input((28, 28, 1)), *body, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


def optimizer_of(name):
    return {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}[name](1e-3)


def batches(rows=BATCH):
    return endless(*fashion_mnist(rows))


def median_step(fit, steps=STEPS):
    """A case for `interleaved`: the median of the milliseconds between the ends of two steps of `fit(steps, clock)`.

    `fit` calls the callback `clock` after each step.
    """
    ends = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))

    def run():
        ends.clear()
        fit(steps, clock)
        # During the first few steps, the input pipeline fills.
        return statistics.median(late - early for early, late in itertools.pairwise(ends[5:])) * 1e3

    return run


def fitted(model, data):
    """The `fit` of a model, as `median_step` calls it."""
    return lambda steps, *callbacks: model.fit(
        data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def print_turns(cases):
    """Prints a JSON line with the time of each case in each turn that counts."""
    turns = [interleaved(cases, rounds=1, warm_up=0) for _ in range(2 + ROUNDS)][2:]
    print(json.dumps({"turns": turns}), flush=True)


def quartiles(values):
    """The median as text, with the lower and the upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def print_replicas(reduction, name):
    """Runs in a separate process; prints the times of stock Keras and ours under one strategy, by turns."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    operations = tf.distribute.ReductionToOneDevice() if reduction == "one_device" else None
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=operations)
    dist = DistributedFit(strategy=strategy)

    def training(optimizer, scope, prepared=False, own_feed=False, jit_compile=False):
        def train(turn, steps):
            with scope():
                model = model_of(name, optimizer_of(optimizer), jit_compile)
            if prepared:
                dist.prepare(model)
            data = dist.dataset(batches(), steps_per_epoch=steps) if own_feed else batches()
            model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[turn])

        return train

    for optimizer in OPTIMIZERS:
        parallel = functools.partial(training, optimizer, dist.scope)
        alone = functools.partial(training, optimizer, contextlib.nullcontext)
        ours = parallel(prepared=True, own_feed=True)
        # Two at a time, as trainings displace each other from the caches. XLA's ratios are large, and need fewer turns.
        pairs = [
            (BLOCKS, {"stock": parallel(), "ours": ours}),
            (BLOCKS, {"stock": parallel(), "ours, stock's feed": parallel(prepared=True)}),
            (BLOCKS // 4, {"ours": ours, "ours, XLA": parallel(prepared=True, own_feed=True, jit_compile=True)}),
            (BLOCKS // 4, {"one device": alone(), "one device, XLA": alone(jit_compile=True)}),
        ]
        took = [{way: list(times) for way, times in in_turns(pair, blocks, BLOCK).items()} for blocks, pair in pairs]
        print(json.dumps({"optimizer": optimizer, "took": took}), flush=True)


def report_replicas():
    """Reports steps on two replicas, ours to stock Keras's."""
    for reduction, name in itertools.product(REDUCTIONS, MODELS):
        rows = []
        for line in printed("replicas", reduction, name):
            took = [{way: np.array(times) / 1e3 for way, times in pair.items()} for pair in line["took"]]
            ratios = [quartiles(list(second / first)) for first, second in (pair.values() for pair in took[:3])]
            alone = [float(np.median(times)) for times in took[3].values()]
            rows.append([line["optimizer"], float(np.median(took[0]["stock"])), *ratios, *alone])
        title = f"A step on 2 replicas, {MODELS[name]}, batch of {BATCH}; gradients are {REDUCTIONS[reduction]}"
        ours = ["ours to stock, at most 1", "both with stock's feed", "ours with XLA to without"]
        report(NAME, title, ["", "stock, ms", *ours, "one device, ms", "with XLA"], rows)


def loopback_bytes():
    """How many bytes this machine has sent to itself since its start."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[0] == "lo:")


def worker_model(make_optimizer):
    # TensorFlow requires this before anything else.
    dist = DistributedFit(strategy="multi_worker")
    with dist.scope():
        model = model_of("mlp", make_optimizer())
    return dist, model


def collectives(fit, steps):
    """Runs some steps, and returns how many all-reduces this worker has begun in them."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            fit(steps)
        (path,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    lines = [(plane.event_metadata, line) for plane in space.planes for line in plane.lines]
    names = [metadata[event.metadata_id].name for metadata, line in lines for event in line.events]
    return sum(name.rpartition(":")[2] == "CollectiveReduceV2" for name in names)


def print_bytes(steps):
    """Runs as each of two workers; prints the bytes sent and the all-reduces per micro-batch as a JSON line."""
    dist, model = worker_model(lambda: AccumulatingOptimizer("adam", int(steps)))
    seen = []

    def take_note(batch, logs):
        if batch % SEGMENT == SEGMENT - 1:
            seen.append(loopback_bytes())

    clock = keras.callbacks.LambdaCallback(on_train_batch_end=take_note)
    count = SEGMENT * (SEGMENTS + 1)
    data = dist.dataset(batches(), steps_per_epoch=count)

    def fit(steps, *callbacks):
        dist.fit(model, data, steps_per_epoch=steps, verbose=0, callbacks=list(callbacks))

    fit(count, clock)
    sent = [(late - early) / SEGMENT for early, late in itertools.pairwise(seen)]
    # Each of the two workers sends the other half of its own gradient, and half of the sum.
    gradients = 2 * sum(4 * int(np.prod(weight.shape)) for weight in model.trainable_weights)
    # In the difference, the all-reduces at the beginning of a `fit` cancel.
    reduces = (collectives(fit, 2 * TRACED) - collectives(fit, TRACED)) / TRACED
    print(json.dumps({"sent": sent, "gradients": gradients, "reduces": reduces}), flush=True)


def report_bytes():
    """Reports the bytes per micro-batch, by the number of micro-batches in an update."""
    start, seconds = loopback_bytes(), 2.0
    time.sleep(seconds)
    others = round((loopback_bytes() - start) / seconds)
    rows, at_one = [], None
    for steps in ACCUMULATED:
        (line,) = on_two_workers("bytes", steps)
        least, most = round(min(line["sent"])), round(max(line["sent"]))
        gradients = round(line["gradients"] / steps)
        at_one = at_one or least
        rows.append([f"k={steps}", least, most, gradients, least - gradients, at_one / least, line["reduces"]])
    title = f"Bytes on the loopback a micro-batch of {BATCH}, two workers on a ring: {MODELS['mlp']}, Adam"
    columns = ["", "least", "most", "gradients by themselves", "the rest", "k=1 to this", "all-reduces a micro-batch"]
    report(NAME, title, columns, [["nothing trained, a second", others, "", "", "", "", ""], *rows])


def print_throughput(optimizer):
    """Runs as each of two workers, on separate cores; prints times of the step and of its parts as a JSON line."""
    dist, model = worker_model(lambda: optimizer_of(optimizer))
    strategy = dist.strategy
    data = dist.dataset(batches(), steps_per_epoch=STEPS)
    share = model_of("mlp", optimizer_of(optimizer))
    vectors = [tf.ones(weight.shape) for weight in model.trainable_weights]

    def summed():
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, vectors)

    all_reduce = tf.function(lambda: strategy.run(summed), autograph=False)

    def bare(steps, clock):
        for step in range(steps):
            all_reduce()
            clock.on_train_batch_end(step, None)

    fits = {
        "step": lambda steps, clock: dist.fit(model, data, steps_per_epoch=steps, verbose=0, callbacks=[clock]),
        "compute": fitted(share, batches(BATCH // 2)),
        "collective": bare,
    }
    print_turns({name: median_step(fit) for name, fit in fits.items()})


def report_throughput():
    """Reports a step on two workers, to the sum of its parts, each alone."""
    (line,) = on_two_workers("throughput", "Adam")
    turns = line["turns"]
    took = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    ratio = quartiles([turn["step"] / (turn["compute"] + turn["collective"]) for turn in turns])
    title = f"Two workers on a ring, a core each, batch of {BATCH}: {MODELS['mlp']}, Adam"
    columns = ["", "ms", "steps a second"]
    names = {
        "step": "a step",
        "compute": f"one worker's step alone, batch of {BATCH // 2}",
        "collective": "the all-reduce of as many bytes alone",
    }
    rows = [[title, took[name], 1e3 / took[name]] for name, title in names.items()]
    report(NAME, title, columns, [*rows, ["the step to the sum of the two", ratio, ""]])


def print_recovery(folder):
    """Runs as each of two workers, and records when each step ends; the last worker kills itself the first time."""
    index = place_in_cluster()
    killed = Path(folder, "killed")
    journal = Path(folder, f"{index}-{os.getpid()}.steps")

    def take_note(batch, logs):
        # Batches that a restarted worker passes over have no logs.
        if logs:
            with journal.open("a") as file:
                print(batch + 1, time.time(), file=file)
        if index == 1 and batch + 1 == KILLED_AT and not killed.exists():
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    dist, model = worker_model(lambda: optimizer_of("Adam"))
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=take_note)
    backup = Backup(Path(folder, "backups"), every=BACKUP_EVERY)
    images, classes = fashion_mnist(BATCH * RECOVERY_STEPS)
    dist.fit(model, images, classes, BATCH, shuffle=False, verbose=0, callbacks=[clock, backup])


def recovered(folder):
    """Trains two workers through a kill; returns the seconds between events, and how many steps were taken again."""
    words = [sys.executable, "-m", "keras_paragrad", "launch", "--workers", "2", "--max-restarts", "1"]
    begun = time.time()
    with subprocess.Popen([*words, __file__, "recovery", folder], stderr=subprocess.PIPE, text=True) as launcher:
        again = [time.time() for line in launcher.stderr if "restarting all processes" in line]
    if launcher.returncode or len(again) != 1:
        raise RuntimeError(f"The launcher ended with {launcher.returncode} after {len(again)} restarts.")
    # The first worker has written one file before the kill, and one after it.
    journals = [[line.split() for line in path.read_text().splitlines()] for path in Path(folder).glob("0-*.steps")]
    journals = [[(int(step), float(when)) for step, when in journal] for journal in journals]
    before, after = sorted(journals)
    killed = float(Path(folder, "killed").read_text())
    first_step, first_time = after[0]
    return {
        "start to first step": before[0][1] - begun,
        "kill to end of all": again[0] - killed,
        "restart to first step": first_time - again[0],
        "kill to first step": first_time - killed,
        "steps lost": KILLED_AT - (first_step - 1),
    }


def report_recovery():
    """Reports how long training takes to go on after a worker is killed."""
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(KILLS)]
        found = [recovered(folder) for folder in folders]
    rows = [
        [what, *(each[what] for each in found), statistics.median(each[what] for each in found)] for what in found[0]
    ]
    columns = ["", *(f"kill {number + 1}" for number in range(KILLS)), "median"]
    title = f"Seconds after SIGKILL to one of two workers at step {KILLED_AT}, backup every {BACKUP_EVERY} steps"
    report(NAME, title, columns, rows)


def printed(*words):
    """Runs a section's separate process; returns the lines that it prints, parsed as JSON."""
    command = [sys.executable, "-W", "ignore", __file__, *map(str, words)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    return [json.loads(line) for line in finished.stdout.splitlines()]


def on_two_workers(*words):
    """Runs a section's process as two workers; returns the lines that the first one prints, parsed as JSON."""
    command = [sys.executable, "-m", "keras_paragrad", "launch", "--workers", "2", __file__, *map(str, words)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    label = "[worker 0] "
    return [json.loads(line.removeprefix(label)) for line in finished.stdout.splitlines() if line.startswith(label)]


IN_PROCESS = {
    "replicas": print_replicas,
    "bytes": print_bytes,
    "throughput": print_throughput,
    "recovery": print_recovery,
}
SECTIONS = {
    "replicas": report_replicas,
    "bytes": report_bytes,
    "throughput": report_throughput,
    "recovery": report_recovery,
}


def main():
    section, *arguments = sys.argv[1:] or [None]
    if arguments:
        IN_PROCESS[section](*arguments)
        return
    for name in [section] if section else SECTIONS:
        SECTIONS[name]()


if __name__ == "__main__":
    main()
