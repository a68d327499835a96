"""Reading a `keras.utils.PyDataset` in several threads or processes, for replicas."""

import itertools
from collections.abc import Iterator
from typing import Any

from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer, PyDatasetAdapter


def read_by_own_workers(adapter: Any) -> None:
    """Gives each iterator over a `PyDataset` with several workers its own enqueuer, stopped when it is dropped.

    Keras has one for all iterators, and stops it when an epoch ends. Where `steps_per_epoch` lets an iterator resume in
    the next epoch, a dataset of replicas, which reads ahead, may then find it stopped: "Iterator called after
    `on_epoch_end`", and batches change their order.

    Args:
        adapter: What Keras reads data with, before anything is read; others than of such a dataset are left alone.
    """
    if not isinstance(adapter, PyDatasetAdapter) or adapter.enqueuer is None:
        return
    dataset, shuffle = adapter.py_dataset, adapter.shuffle

    def batches() -> Iterator[Any]:
        enqueuer = OrderedEnqueuer(
            dataset, dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size, shuffle
        )
        enqueuer.start()
        try:
            for batch in itertools.islice(enqueuer.get(), dataset.num_batches):
                yield adapter._standardize_batch(batch)
        finally:
            enqueuer.stop()

    # Keras starts and stops no enqueuer if there is none, and reads with one of these two then.
    adapter.enqueuer = None
    adapter._finite_generator = adapter._infinite_generator = batches
