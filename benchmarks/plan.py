"""Whether `DistributedFit(fit_memory=True)` chooses the fastest way to train that fits.

`python benchmarks/plan.py` trains models in every way that is a candidate of the plan, each in a separate process. Then
plans choose for four budgets of memory, with trials that look up what was measured. It prints the table and saves it in
`results/plan.json`. `python benchmarks/plan.py one` does one device alone, `two` two logical ones. With `KEEP=FOLDER`
what was measured is kept there, and not measured again.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from harness import report

DEVICES = {"one": 1, "two": 2}
# Rows of a batch, by model.
BATCHES = {"CNN": 128, "Transformer": 64, "LSTM": 256}
# The budgets: shares of what the model takes as it is.
BUDGETS = (1.1, 0.75, 0.5, 0.3)
STEPS = 7


def model_of(name):
    import keras
    from estimate import block

    layers = keras.layers
    if name == "CNN":
        inputs = keras.Input((48, 48, 3))
        hidden = inputs
        for index in range(6):
            hidden = layers.Conv2D(32 * 2 ** (index // 3), 3, padding="same")(hidden)
            hidden = layers.GroupNormalization(8)(hidden)
            hidden = layers.ReLU()(hidden)
            hidden = layers.MaxPooling2D()(hidden) if index == 2 else hidden
        hidden = layers.GlobalAveragePooling2D()(hidden)
    elif name == "LSTM":
        inputs = keras.Input((100, 64))
        hidden = layers.LSTM(256)(layers.LSTM(256, return_sequences=True)(inputs))
    else:
        inputs = keras.Input((64,))
        hidden = layers.Embedding(1000, 256)(inputs)
        for index in range(6):
            hidden = block(64, 256, f"block_{index}")(hidden)
        hidden = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, layers.Dense(10)(hidden), name=name)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def prepared(name, devices):
    """A `DistributedFit` on some logical devices, and its model."""
    import tensorflow as tf

    from keras_paragrad import DistributedFit

    where = {}
    if devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
        where = {"strategy": "mirrored", "devices": [f"CPU:{index}" for index in range(devices)]}
    dist = DistributedFit(fit_memory=True, device_bytes=2**40, **where)
    with dist.scope():
        model = model_of(name)
    return dist, model


def measure(name, devices):
    """Measures the bytes and seconds of every candidate; prints as JSON what plans for the budgets choose by them."""
    from keras_paragrad.distribution.replicas import memory as replicas
    from keras_paragrad.memory import plan as plans
    from keras_paragrad.memory.plan import MemoryPlan, choose

    dist, model = prepared(name, devices)
    run, replicas._STEPS = dist._run, STEPS
    shards, _ = replicas._shards(model, run.plan.shard.value)
    options = {"replicas": devices, "shards": shards, "no_slices": replicas._no_slices(model)}
    # Otherwise, a model that fits by far would get fewer candidates.
    plans._CERTAIN = 0.0
    plan = plans.plan_memory(model, BATCHES[name], 2**40, None, **options)
    spec = next(iter(plan_batches(model, name)))
    trial = replicas._make_trial(model, run, BATCHES[name], spec, 2**40)
    measured = kept(name, devices)
    for candidate in plan.candidates:
        if candidate.choice not in measured:
            measured[candidate.choice] = trial(candidate)
            keep(name, devices, measured)
            print(candidate.choice, candidate.estimated, measured[candidate.choice], file=sys.stderr, flush=True)
    # The first candidate is to train the model as it is.
    whole = measured[plan.candidates[0].choice].bytes
    rows = []
    for share in BUDGETS:
        budget = int(share * whole)

        def lookup(candidate, budget=budget):
            found = measured[candidate.choice]
            return found if found.bytes <= budget else None

        fitting = [found for found in measured.values() if found.bytes <= budget]
        best = min((found.seconds for found in fitting), default=None)
        row = {"model": name, "devices": devices, "budget, MB": round(budget / 1e6), "ways": len(measured)}
        row |= {"ways that fit": len(fitting), "fastest that fits, s": best}
        chosen = MemoryPlan(name, BATCHES[name], devices, budget)
        chosen.recomputed, chosen.candidates = plan.recomputed, [dataclasses.replace(way) for way in plan.candidates]
        try:
            choose(chosen, lambda lookup=lookup: lookup, lambda line: None)
        except ValueError:
            rows.append({**row, "chosen": "refused"})
            continue
        seconds = measured[chosen.chosen.choice].seconds
        row |= {"chosen": chosen.in_words(), "chosen, s": seconds, "over the fastest": f"{seconds / best - 1:+.0%}"}
        rows.append({**row, "trials": chosen.trials})
    print(json.dumps(rows))


def kept(name, devices):
    """What was measured before, by choice."""
    from keras_paragrad.memory.plan import Choice
    from keras_paragrad.memory.trial import Measured

    file = Path(os.environ.get("KEEP", "/nowhere"), f"{name}-{devices}.json")
    found = json.loads(file.read_text()) if file.exists() else []
    return {Choice(**choice): Measured(**measured) for choice, measured in found}


def keep(name, devices, measured):
    """Saves what was measured, if there is a folder for it."""
    if folder := os.environ.get("KEEP"):
        found = [[dataclasses.asdict(choice), dataclasses.asdict(value)] for choice, value in measured.items()]
        Path(folder, f"{name}-{devices}.json").write_text(json.dumps(found))


def plan_batches(model, name):
    """Yields the specs of a batch of data."""
    import tensorflow as tf

    x = tf.TensorSpec((None, *model.inputs[0].shape[1:]), model.inputs[0].dtype)
    yield x, tf.TensorSpec((None,), "int32")


def in_own_process(name, devices):
    command = [sys.executable, "-W", "ignore", __file__, "measure", name, str(devices)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(which):
    for word in which:
        rows = []
        for name in BATCHES:
            rows += in_own_process(name, DEVICES[word])
        columns = list(rows[0])
        title = f"What fit_memory chooses on {word} device{'s' if word == 'two' else ''} of a CPU"
        report("plan", title, columns, [[row.get(column, "") for column in columns] for row in rows])


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1:] or list(DEVICES))
