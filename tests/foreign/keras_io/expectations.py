"""What each component does with each miniature: the steps of plain Keras, unless it stands here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
from foreign.keras_io.miniatures import MINIATURES

WAYS = ("accumulation", "slices", "replicas", "shards", "recomputation", "telemetry")
TOLERANCE = 2e-6
# Of loops without `fit`, and of models of Keras 2, there are no miniatures here.
BY_HAND, KERAS_2 = "loops by hand", "models of Keras 2"
CLASSES = {**{name: case.group for name, case in MINIATURES.items()}, "by_hand": BY_HAND, "of_transformers": KERAS_2}


class Outcome(NamedTuple):
    """What comes of a miniature.

    Attributes:
        refused: What the error says, or `None`.
        warned: What a warning says of a training that takes other steps, or `None`.
        options: What the component has to be told, one argument.
        changed: What has to be changed in the model, one argument.
        logs: Whether `fit` shows what plain Keras shows.
        called: What the documentation calls it, if it isn't exact.
    """

    refused: str | None = None
    warned: str | None = None
    options: Mapping[str, Any] = {}
    changed: Mapping[str, Any] = {}
    logs: bool = True
    called: str = ""

    @property
    def exact(self) -> bool:
        """Whether the steps are those of plain Keras, with at most one argument changed."""
        return self.refused is None and self.warned is None

    @property
    def word(self) -> str:
        """What the documentation calls it."""
        if not self.exact:
            return self.called or ("refused" if self.warned is None else "warned")
        arguments = {**self.options, **self.changed}.items()
        return ", ".join(f"`{name}={getattr(value, '__name__', repr(value))}`" for name, value in arguments) or "exact"


CUT = ("accumulation", "slices")
SPREAD = ("replicas", "shards")
PARTS = (*CUT, *SPREAD)
# What the errors and warnings say.
NUMBER = "returns one number for the whole batch"
LOSS = "defines its own compute_loss"
STATED, PHASES = "has to be stated", "micro-batches can't be accumulated one after the other"
ROWS = "for some rows of a batch depend on its other rows"
BATCHES = "with the statistics of each micro-batch"


def refused(says: str, ways: tuple[str, ...] = PARTS) -> dict[str, Outcome]:
    """An error, in each of these ways."""
    return dict.fromkeys(ways, Outcome(refused=says))


def tokens(x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The tokens that are not padding."""
    return keras.ops.sum(y > 0)


# A `train_step` of the model's own states how a micro-batch counts; logs of windows are means over micro-batches, which
# may be uneven.
MEAN, SUM = {"weighting": "examples"}, {"weighting": "sum"}
STEP, SUMMED = {"accumulation": Outcome(options=MEAN, logs=False)}, {"accumulation": Outcome(options=SUM)}
# No weighting is true of these.
UNSTATED = refused(STATED, ("accumulation",))
SEVERAL = {"accumulation": Outcome(refused=PHASES, options=MEAN)}
OPTIMIZERS = refused(PHASES, ("accumulation",))
NORMALIZED = {
    **dict.fromkeys(CUT, Outcome(warned=BATCHES)),
    **dict.fromkeys(SPREAD, Outcome(changed={"synchronized": True})),
}

EXCEPTIONS: dict[str, dict[str, Outcome]] = {
    # Losses.
    "masked_tokens": {"accumulation": Outcome(options={"weighting": tokens})},
    # What their losses divide by isn't read, and stated.
    **dict.fromkeys(
        ("siamese", "restoration", "captcha", "endpoint", "distillation", "rated"),
        {"accumulation": Outcome(options=MEAN)},
    ),
    "weighted_mean": {"accumulation": Outcome(options={"weighting": "sample_weight"})},
    "normalized_siamese": {**NORMALIZED, "accumulation": Outcome(warned=BATCHES, options=MEAN)},
    "switch_transformer": refused("A layer adds a loss", ("accumulation",)),
    "points": {**NORMALIZED, **refused("A layer adds a loss", ("accumulation",))},
    # Losses that compare rows.
    "supervised_contrastive": refused("is .* off the gradient", ("accumulation",)),
    "retrieval": refused(LOSS, ("accumulation",)),
    "summed_retrieval": refused(LOSS, ("accumulation",)),
    "correlated": refused(NUMBER, ("accumulation",)),
    "barlow_twins": {
        **refused("returns one number", ("accumulation",)),
        "slices": Outcome(warned=BATCHES),
        **dict.fromkeys(SPREAD, Outcome(changed={"synchronized": True})),
    },
    **dict.fromkeys(("metric_learning", "dual_encoder", "queue"), UNSTATED),
    # Layers.
    "batch_normalization": NORMALIZED,
    "recommender": refused(ROWS, ("accumulation",)),
    "molecules": refused("different numbers of rows", SPREAD),
    "running_maximum": refused(ROWS, ("accumulation",)),
    "spectral_normalization": {
        **refused(ROWS, ("accumulation",)),
        **refused("assigns to its weight", ("shards", "recomputation")),
    },
    # Steps.
    **dict.fromkeys(
        (
            "autoencoder",
            "diffusion",
            "masked_autoencoder",
            "speech",
            "guide",
            "two_heads",
            "vector_quantized",
            "flow",
            "zero_reference",
            "graph_attention",
            "one_token",
        ),
        STEP,
    ),
    **dict.fromkeys(("triplets", "summed_step"), SUMMED),
    **dict.fromkeys(("captions", "masked_captions"), SEVERAL),
    **dict.fromkeys(("sharpness_aware", "fixed_noise", "clipping_step", "thresholded", "shuffled"), UNSTATED),
    "normalizing_step": {**NORMALIZED, "accumulation": Outcome(warned=BATCHES, options=MEAN)},
    **dict.fromkeys(
        ("gan", "wgan_gp", "cyclegan", "forward_forward", "fixed_noise_gan", "counting_gan", "simclr"), OPTIMIZERS
    ),
    "normalizing_gan": {
        **OPTIMIZERS,
        "slices": Outcome(warned=BATCHES),
        **dict.fromkeys(SPREAD, Outcome(changed={"synchronized": True})),
    },
}


EXCEPTIONS |= {
    "by_hand": {
        "accumulation": Outcome(options={"weighting": "uniform"}),
        **dict.fromkeys(("slices", *SPREAD, "telemetry"), Outcome(refused="", called="by hand")),
    },
    "of_transformers": dict.fromkeys(WAYS, Outcome(refused="", called="Keras 2")),
}


def expected(name: str, way: str) -> Outcome:
    """What a component does with a miniature."""
    return EXCEPTIONS.get(name, {}).get(way, Outcome())
