"""The charts of a report whose bars are one below the other: layers, and a pipeline's stages.

A box of a lane is its kind, its milliseconds and its name; and when it begins, if not where the last one ends.
"""

from keras_paragrad.profiling.report.lines import Block
from keras_paragrad.profiling.summary import COLLECTIVES, PASSES, PipelineTime, ProfileSummary

MOST_TIMED_LAYERS = 50
_MOST_LAYER_BARS = 15


def layers_chart(summary: ProfileSummary) -> Block | None:
    """The layers that take longest, each as a lane of its passes; `None` if the trace names no layer."""
    # Waiting for other replicas would dwarf the layers' times.
    layers = [layer for layer in summary.layers if layer.is_layer or layer.name != COLLECTIVES]
    if not layers:
        return None
    batches, total = len(summary.steps) or 1, sum(layer.total for layer in layers) or 1.0
    # By layer, milliseconds of each pass.
    times = [[getattr(layer, name) / batches or None for name in PASSES] for layer in layers]
    lanes = [
        {
            "name": layer.name,
            "apart": not layer.is_layer,
            "boxes": [(name, time, name) for name, time in zip(PASSES, passes, strict=True) if time],
        }
        for layer, passes in zip(layers[:_MOST_LAYER_BARS], times, strict=False)
    ]
    note = "Times of concurrent threads and devices are summed."
    if len(lanes) < len(layers):
        listed = "all" if len(layers) <= MOST_TIMED_LAYERS else f"{MOST_TIMED_LAYERS} of them"
        note += f" The chart shows {len(lanes)} of {len(layers):,} layers; the table lists {listed}."
    if any(not layer.is_layer for layer in layers):
        note += " Entries in italics belong to no layer, or can't be attributed to one, such as custom gradients."
    return {
        "type": "lanes",
        "title": f"Time {'per batch' if summary.steps else 'in the window'} by layer",
        "above": True,
        "lanes": lanes,
        "legend": {name: name for column, name in enumerate(PASSES) if any(passes[column] for passes in times)},
        "heads": [("layer", ""), ("total", "ms"), *((name, "ms") for name in PASSES), ("share", "share")],
        "rows": [
            (layer.name, layer.total / batches, *passes, layer.total / total)
            for layer, passes in zip(layers[:MOST_TIMED_LAYERS], times, strict=False)
        ],
        "note": [note],
    }


def stages_chart(times: PipelineTime) -> Block:
    """The stages of a pipeline, with a lane for each device."""
    lanes, rows = [], []
    for key in sorted({(piece.stage, piece.column) for piece in times.work}):
        name = f"stage {key[0]}{chr(ord('a') + key[1]) if times.columns > 1 else ''}"
        work = sorted((piece for piece in times.work if (piece.stage, piece.column) == key), key=lambda one: one.begins)
        boxes = []
        for piece in work:
            direction = "backward" if piece.backward else "forward"
            number = piece.micro_batch
            boxes.append((direction, piece.duration, f"micro-batch {number}, {direction}", piece.begins, number))
        lanes.append({"name": name, "boxes": boxes})
        sums = [sum(piece.duration for piece in work if piece.backward is back) for back in (False, True)]
        rows.append((name, *sums))
    devices = f" and up to {times.columns} devices each, a, b and so on" if times.columns > 1 else ""
    return {
        "type": "lanes",
        "title": f"Stages in batch {times.step:,}",
        "lanes": lanes,
        "legend": {name: f"{name}, with the number of the micro-batch" for name in ("forward", "backward")},
        "heads": [("stage", ""), ("forward", "ms"), ("backward", "ms")],
        "rows": rows,
        "note": (
            *(
                "Stages wait ",
                (times.bubble, "share"),
                " of the time between their first and last operation, over all ",
            ),
            *(f"batches. {times.stages} stages of equal time would wait ", (times.ideal, "share"), " with "),
            f"{times.microbatches} micro-batches{devices}.",
        ),
    }
