"""Advice for a slow input pipeline: only what it doesn't do yet."""

from collections.abc import Collection

_FROM_PYTHON = (
    "Python makes the batches one at a time. In a PyDataset, make several at once: "
    "super().__init__(workers=4, use_multiprocessing=True). A generator can't be run in parallel: make it a "
    "keras.utils.PyDataset with workers, or a tf.data.Dataset that reads and maps without Python."
)
_PARALLEL = ".map(f, num_parallel_calls=tf.data.AUTOTUNE)"
_PREFETCH = ".prefetch(tf.data.AUTOTUNE)"


def about_input(stages: Collection[str]) -> str:
    """What to do.

    Args:
        stages: The stages of the pipeline as the trace names them; empty if the trace doesn't say.

    Example:

    >>> from keras_paragrad.profiling.analysis.input_advice import about_input
    >>> about_input({"Prefetch", "Map", "TensorSlice"})
    'Prepare batches in parallel: dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE); .cache() what fits into memory.'
    """
    if "Generator" in stages:
        return _FROM_PYTHON
    # TensorFlow itself runs some maps in parallel: these are named ParallelMap in the trace, and are not advised again.
    parallel = bool(stages) and "Map" not in stages
    prefetched = "Prefetch" in stages
    what = [*([] if prefetched else ["prefetch"]), *([] if parallel else ["prepare batches in parallel"])]
    cached = any("Cache" in stage for stage in stages)
    if not what:
        cache = "" if cached else ".cache() what fits into memory, "
        first = "The pipeline already prefetches, and has no sequential map: "
        return f"{first}{cache}make its slowest part cheaper, or do that work once, before training."
    calls = f"dataset{'' if parallel else _PARALLEL}{'' if prefetched else _PREFETCH}"
    sentence = " and ".join(what)
    return f"{sentence[0].upper()}{sentence[1:]}: {calls}{'.' if cached else '; .cache() what fits into memory.'}"
