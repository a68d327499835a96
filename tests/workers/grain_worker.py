"""One of two workers that read Grain's datasets: its rows, what it has read of the source, and what it trains."""

import numpy as np
import tensorflow as tf
from trainings import every_component
from trainings.auto_strategies import auto_strategy

import keras_paragrad as paragrad
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.distribution.data import distributed_dataset


def examples():
    return list(zip(every_component.X, every_component.Y, every_component.WEIGHTS, strict=True))


def rows():
    import grain

    return grain.MapDataset.source(examples())


def loader(size):
    import grain

    sampler = grain.samplers.SequentialSampler(every_component.ROWS, grain.sharding.NoSharding())
    return grain.DataLoader(data_source=examples(), sampler=sampler, operations=[grain.transforms.Batch(size)])


KINDS = {
    "MapDataset": lambda size: rows().batch(size),
    "IterDataset": lambda size: rows().to_iter_dataset().batch(size),
    "filtered": lambda size: rows().filter(lambda row: True).to_iter_dataset().batch(size),
    "DataLoader": loader,
}


class Source:
    """Numbers, which notes those that are read."""

    def __init__(self, count=21):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(int(index))
        return np.int64(index)


def skipping_odd(number):
    return None if number % 2 else number


def forms(source):
    import grain

    rows = grain.MapDataset.source(source)
    pad = lambda values: np.asarray([*values, *[0] * (8 - len(values))])  # noqa: E731
    return {
        "map": (rows.batch(8), {}),
        "shuffled": (rows.shuffle(seed=1).batch(8), {}),
        "iterator of batches": (rows.batch(8).to_iter_dataset(), {}),
        "batches of an iterator": (rows.to_iter_dataset().batch(8), {}),
        "drop_remainder": (rows.batch(8, drop_remainder=True), {}),
        "one row left": (rows.batch(10), {}),
        "mapped batches": (rows.batch(8).map(lambda batch: batch), {}),
        "filtered": (rows.filter(lambda number: number % 2 == 1).to_iter_dataset().batch(8), {}),
        "padded": (rows.batch(8, batch_fn=pad), {}),
        "asked for all": (rows.batch(8), {"shard_policy": "data"}),
    }


def rows_of(strategy, data):
    steps = [strategy.experimental_local_results(step) for step in data]
    return [[int(row) for piece in step for row in piece.numpy()] for step in steps]


def read(strategy, form):
    source = Source()
    data, options = forms(source)[form]
    distributed = distributed_dataset(strategy, data, **options)
    before, source.read[:] = [*source.read], []
    rows = rows_of(strategy, distributed)
    during = [*source.read]
    return {
        "steps": distributed.num_batches,
        "read before": before,
        "rows": rows,
        "read": during,
        "again": rows_of(strategy, distributed),
    }


def refused(strategy, data):
    try:
        return str(rows_of(strategy, distributed_dataset(strategy, data)))
    except (ValueError, tf.errors.OpError) as error:
        return str(error)


def trained(dist, kind, fit):
    with dist.scope():
        model = every_component.network(weighted_metrics=["accuracy"])
    history = fit(model, KINDS[kind](8), epochs=2, shuffle=False, verbose=0, validation_data=KINDS[kind](8))
    predicted = model.predict(dist.dataset(KINDS[kind](8)), verbose=0)
    return {"weights": model.get_weights(), "history": history.history, "predicted": predicted}


def main(_):
    import grain

    dist = paragrad.DistributedFit(strategy=auto_strategy(), jit=False)
    strategy = dist.strategy
    worker = replica_placement(strategy).worker

    def own_fit(model, *arguments, **options):
        dist.prepare(model)
        return model.fit(*arguments, **options)

    rows = grain.MapDataset.source(Source(21 - worker))
    return {
        **{form: read(strategy, form) for form in forms(Source())},
        "trained": {
            "fit": trained(dist, "MapDataset", dist.fit),
            "own fit": trained(dist, "IterDataset", own_fit),
        },
        "refused": {
            "other length": refused(strategy, rows.batch(8)),
            "other order": refused(strategy, grain.MapDataset.source(Source()).shuffle(seed=worker).batch(8)),
            "elements left out": refused(
                strategy, grain.MapDataset.source(Source()).map(skipping_odd).to_iter_dataset().batch(8)
            ),
        },
    }
