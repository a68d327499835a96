"""A case of the fuzzer: one setting of each axis, drawn from a number, and what is simpler than it."""

import json
import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]

# The first setting of each axis is the simplest. A case is shrunk axis by axis, in this order.
AXES: dict[str, tuple[Any, ...]] = {
    # Ours.
    "watch": ("nothing", "telemetry", "wrap", "noise scale", "throughput"),
    "transform": ("none", "scaled", "with momentum"),
    "recompute": ("nothing", "segments", "a layer"),
    "slices": (0, 3, 5),
    "steps": (1, 2, 3),
    "devices": (
        "one",
        "replicas",
        "optimizer in shards",
        "parameters in shards",
        "mesh of rows",
        "mesh of columns",
        "pipeline",
    ),
    "through": ("dist.fit", "prepare"),
    # How it is run.
    "fits": ("one", "two", "compiled again", "from .keras", "from weights"),
    "validation": ("none", "data", "split"),
    "callback": ("none", "rate", "early stopping"),
    "data": ("arrays", "dataset", "PyDataset", "unknown length", "generator"),
    "per_call": (1, 2, 3),
    "jit": (False, "auto", True),
    "eager": (False, True),
    "epochs": (1, 2, 3),
    "batch": (6, 12),
    "rows": (12, 24, 31, 25, 14),
    # The optimizer.
    "scale": ("none", "LossScaleOptimizer", "loss_scale_factor"),
    "schedule": ("none", "exponential", "piecewise"),
    "average": ("none", "ema", "ema overwritten"),
    "decay": (0.0, 0.02),
    "clip": ("none", "clipnorm", "global_clipnorm", "clipvalue"),
    "optimizer": (
        "SGD",
        "momentum",
        "Adam",
        "AdamW",
        "amsgrad",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "Nadam",
        "Lamb",
        "Ftrl",
    ),
    # The loss.
    "loss_weights": ("none", "given", "annealed"),
    "metrics": ("none", "plain", "weighted", "both"),
    "weights": ("none", "by row", "some zero", "by class", "by position"),
    "loss": (
        "mse",
        "object",
        "sum",
        "weighted mean",
        "not reduced",
        "function",
        "own class",
        "one number",
        "labels",
        "ignored labels",
        "labels, weighted mean",
        "smoothed",
        "binary",
        "cosine",
        "pairs",
    ),
    # The model.
    "regularizer": (None, "l2"),
    "step": ("Keras's", "compute_loss", "guide", "mean", "two phases"),
    "model": (
        "dense",
        "residual",
        "shared",
        "nested",
        "two inputs",
        "two outputs",
        "named inputs",
        "layer norm",
        "frozen",
        "constrained",
        "convolution",
        "embedding",
        "masked mean",
        "masked",
        "masked LSTM",
        "masked attention",
        "adds a mean",
        "adds values",
        "activity",
        "counting",
        "batch norm",
        "synchronized batch norm",
    ),
}
_NAMES = tuple(AXES)
COMPONENTS = _NAMES[: _NAMES.index("fits")]
# Simplified together at first, as most settings have nothing to do with a finding.
GROUPS = (
    _NAMES[_NAMES.index("fits") :],
    _NAMES[_NAMES.index("scale") : _NAMES.index("loss_weights")],
    _NAMES[_NAMES.index("fits") : _NAMES.index("scale")],
    _NAMES[_NAMES.index("loss_weights") :],
    COMPONENTS[:4],
)
TOKENS = ("embedding", "masked mean", "masked", "masked LSTM", "masked attention")
SEQUENCES = ("masked", "masked LSTM", "masked attention")
LABELS = ("labels", "ignored labels", "labels, weighted mean")
# What `make test` combines: each way to train with all that makes it hard. A group's settings meet in one training,
# and its last batch has one row or few, so that a micro-batch is short, and a replica has none.
WAYS: dict[str, Case] = {
    "windows": {"steps": 3},
    "slices": {"slices": 5},
    "recompute": {"recompute": "segments"},
    "replicas": {"devices": "replicas"},
    "windows on replicas": {"steps": 2, "devices": "replicas"},
    "slices on replicas": {"slices": 3, "devices": "replicas", "through": "prepare"},
    "optimizer in shards": {"devices": "optimizer in shards"},
    "parameters in shards": {"devices": "parameters in shards"},
    "windows and slices in shards": {"steps": 2, "slices": 5, "devices": "parameters in shards"},
    "mesh of rows": {"devices": "mesh of rows"},
    "mesh of columns": {"devices": "mesh of columns"},
    "pipeline": {"devices": "pipeline"},
}
HARD: dict[str, Case] = {
    "masks": {
        **{"model": "masked LSTM", "loss": "object", "weights": "by position"},
        **{"optimizer": "momentum", "rows": 25, "batch": 12},
    },
    "outputs": {
        **{"model": "two outputs", "loss": "object", "loss_weights": "annealed", "weights": "some zero"},
        **{"metrics": "both", "regularizer": "l2", "optimizer": "AdamW", "decay": 0.02, "average": "ema overwritten"},
        **{"data": "PyDataset", "validation": "data", "clip": "global_clipnorm", "scale": "loss_scale_factor"},
        **{"rows": 31, "batch": 12, "epochs": 2},
    },
    "labels": {
        **{"model": "constrained", "loss": "labels, weighted mean", "weights": "by class", "optimizer": "Lamb"},
        **{"scale": "LossScaleOptimizer", "schedule": "exponential", "clip": "clipvalue", "per_call": 2},
        **{"data": "dataset", "rows": 25, "batch": 12},
    },
    "an own step": {
        **{"step": "guide", "model": "residual", "loss": "sum", "optimizer": "Adagrad", "clip": "clipnorm"},
        **{"average": "ema", "rows": 25, "batch": 12},
    },
    "embeddings": {
        **{"model": "embedding", "loss": "ignored labels", "weights": "by class", "optimizer": "Adam"},
        **{"rows": 25, "batch": 12, "fits": "two"},
    },
    "states": {"model": "counting", "data": "dataset", "rows": 25, "batch": 12},
    "XLA": {
        **{"model": "convolution", "jit": True, "weights": "by row", "loss": "smoothed", "optimizer": "RMSprop"},
        **{"clip": "global_clipnorm", "rows": 24, "batch": 12},
    },
}
# How often an axis is at its first setting.
_PLAIN = {"devices": 0.45, "steps": 0.5, "slices": 0.65, "recompute": 0.7, "transform": 0.75, "watch": 0.6}
_PLAIN |= {"model": 0.1, "loss": 0.2, "optimizer": 0.15, "epochs": 0.3, "rows": 0.2, "step": 0.7, "fits": 0.5}
_PLAIN |= {"eager": 0.9, "jit": 0.65, "scale": 0.8}


def drawn(number: int) -> Case:
    """The case of a number: at least one component, and settings that fit each other."""
    draw = random.Random(number)
    while True:
        case = {
            name: values[0] if draw.random() < _PLAIN.get(name, 0.5) else draw.choice(values[1:])
            for name, values in AXES.items()
        }
        case = settled(case)
        if any(case[name] != AXES[name][0] for name in COMPONENTS):
            return case


def settled(case: Case) -> Case:
    """The case with what it leaves out, and the first setting where others make no sense together.

    Raises:
        ValueError: A setting isn't on its axis.
    """
    for name, value in case.items():
        if value not in AXES.get(name, ()):
            raise ValueError(f"{name!r}: {value!r} is in no case. Settings: {AXES.get(name, list(AXES))}")
    case = {name: case.get(name, values[0]) for name, values in AXES.items()}

    def leave_out(name: str, where: bool) -> None:
        if where:
            case[name] = AXES[name][0]

    # A pair of rows has no value for each position; a number for each row is what own steps are written for.
    leave_out("loss", case["model"] in SEQUENCES and case["loss"] in ("pairs", "one number", "cosine"))
    # Keras reads the mask of outputs where it computes a loss, not where the step does.
    plain_loss = case["loss"] in ("mse", "object", "function") and case["model"] not in (*SEQUENCES, "two outputs")
    leave_out("step", case["step"] in ("mean", "two phases") and not plain_loss)
    leave_out("step", case["step"] == "compute_loss" and case["model"] == "two outputs")
    one = case["model"] != "two outputs"
    leave_out("weights", case["weights"] == "by class" and (case["loss"] not in LABELS or not one))
    leave_out("weights", case["weights"] == "by class" and case["model"] in SEQUENCES)
    leave_out("weights", case["weights"] == "by position" and case["model"] not in SEQUENCES)
    leave_out("weights", case["loss"] in ("one number", "pairs"))
    # Keras's own steps without `compute_loss` take no weights.
    leave_out("weights", case["step"] in ("mean", "two phases"))
    leave_out("loss_weights", case["step"] in ("mean", "two phases"))
    leave_out("metrics", case["step"] in ("mean", "two phases"))
    leave_out("validation", case["validation"] == "split" and case["data"] != "arrays")
    leave_out("callback", case["callback"] == "rate" and case["schedule"] != "none")
    leave_out("decay", case["optimizer"] in ("Ftrl",))
    leave_out("per_call", bool(case["eager"]))
    leave_out("jit", bool(case["eager"]))
    leave_out("through", case["devices"] == "one")
    # Of data without an end, Keras takes whole calls, also past the epoch's last batch.
    calls = -(-case["rows"] // (case["batch"] // case["steps"])) / case["per_call"]
    leave_out("per_call", case["data"] == "generator" and calls % 1 != 0)
    # Keras divides no gradient of rows by a factor, and adds no values to a number.
    leave_out("scale", case["scale"] == "loss_scale_factor" and case["model"] in TOKENS)
    leave_out("loss", case["loss"] == "not reduced" and case["step"] == "guide")
    # Refused in every case, and tested to be.
    leave_out("slices", case["devices"].startswith(("mesh", "pipeline")))
    leave_out("transform", case["devices"] not in ("one", "replicas", "pipeline"))
    leave_out(
        "watch", case["watch"] in ("wrap", "noise scale") and (case["step"] != "Keras's" or "mesh" in case["devices"])
    )
    leave_out("recompute", case["watch"] in ("wrap", "noise scale"))
    leave_out("eager", "mesh" in case["devices"])
    leave_out("step", case["step"] not in ("Keras's", "compute_loss") and case["devices"] == "pipeline")
    # A `.keras` file holds no transform.
    leave_out("transform", case["fits"] == "from .keras")
    return case


def brief(case: Case) -> Case:
    """What sets a case apart from the simplest."""
    return {name: value for name, value in case.items() if value != AXES[name][0]}


def in_every_way(hard: Case) -> dict[str, Case]:
    """By way, the case of each in which the settings that make it hard have a meaning."""
    cases = {way: settled({**hard, **settings}) for way, settings in WAYS.items()}
    return {way: case for way, case in cases.items() if case.items() >= {**hard, **WAYS[way]}.items()}


def written(case: Case) -> str:
    """As `CASE=` takes it."""
    return json.dumps(brief(case))


def read(text: str) -> Case:
    """The case of a number or of what `written` returns."""
    return drawn(int(text)) if text.strip().isdigit() else settled(json.loads(text))


def simpler(case: Case) -> Iterator[Case]:
    """The case with a group of axes at their first settings, then with one axis there, or at an earlier setting."""
    seen = [case]
    for group in GROUPS:
        one = settled({**case, **{name: AXES[name][0] for name in group}})
        if one not in seen:
            seen.append(one)
            yield one
    for name, values in AXES.items():
        place = values.index(case[name])
        for value in dict.fromkeys((values[0], *values[1 : min(place, 3)])):
            one = settled({**case, name: value})
            if place and one not in seen:
                seen.append(one)
                yield one
