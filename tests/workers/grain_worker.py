"""One of two workers that train on Grain's datasets."""

import numpy as np
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

    refused = ""
    try:
        distributed_dataset(strategy, grain.MapDataset.source(np.arange(21)).shuffle(seed=worker).batch(8))
    except ValueError as error:
        refused = str(error)
    return {
        "trained": {"fit": trained(dist, "MapDataset", dist.fit), "own fit": trained(dist, "IterDataset", own_fit)},
        "refused": refused,
    }
