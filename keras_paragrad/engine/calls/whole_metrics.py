"""Updates metrics on replicas: Keras's own add up, and those of one's own get the outputs of the whole batch."""

from typing import Any

import keras

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.types import LossArguments
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch
from keras_paragrad.engine.calls.replicas import gather_batch, metrics_of_one_device
from keras_paragrad.engine.losses.known_classes import metrics_are_known
from keras_paragrad.engine.losses.logs import overrides_compute_metrics, update_metrics


def update_metrics_of(model: keras.Model, batch: LossArguments, replica_batch: ReplicaBatch) -> None:
    """Updates the metrics with this replica's examples, or with those of all replicas."""
    outputs = keras.tree.flatten(batch["y_pred"])
    if replica_count() == 1 or metrics_are_known(model) or not all(output.shape.rank for output in outputs):
        replica_batch.run(lambda: update_metrics(model, batch))
        return
    masks = list(map(mask_of, outputs))
    x = batch["x"] if overrides_compute_metrics(model) else None
    whole: Any = gather_batch((x, batch["y"], outputs, batch["sample_weight"], masks), replica_batch.rows)
    x, y, outputs, weights, masks = whole
    y_pred = keras.tree.pack_sequence_as(batch["y_pred"], list(map(with_mask, outputs, masks)))
    with metrics_of_one_device(model):
        update_metrics(model, {"x": x, "y": y, "y_pred": y_pred, "sample_weight": weights})
