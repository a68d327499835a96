"""`Pipeline`: how a model is cut into stages."""

from collections.abc import Sequence
from dataclasses import dataclass

from keras_paragrad.arguments import check_choice, check_each, check_integer, check_text, refusal

SCHEDULES = ("gpipe",)
BALANCES = ("parameters", "time")


@dataclass(frozen=True)
class Pipeline:
    """A strategy for `DistributedFit`: a Functional or Sequential model in stages, one on each device.

    Each device holds the weights, gradients and optimizer state of its stage, and computes it. A batch passes the
    stages in micro-batches, several of them at once (GPipe). Training is the same as on one device with whole batches:
    micro-batches are weighted by their loss normalizers, and metrics see every example.

    Args:
        stages: The number of stages. The model is cut so that the largest stage is about as small as possible, and few
            tensors cross the cuts.
        cuts: Instead of `stages`, the names of the layers that end a stage, all but the last, in order.
        microbatches: The number of micro-batches that a batch is cut into. Sizes differ by one example at most.
        schedule: `"gpipe"`. `"1f1b"` is refused: on TensorFlow it was measured to save no memory.
        balance: With `stages`, the size of a stage: the bytes of its `"parameters"`; or the `"time"` of its forward and
            backward pass, measured layer by layer on made-up examples when the model is prepared.

    Raises:
        ValueError: An argument is invalid, or both or neither of `stages` and `cuts` are given.

    Example:

    >>> from keras_paragrad.distribution import Pipeline
    >>> Pipeline(cuts=["block_2", "block_5"], microbatches=8).count
    3
    """

    stages: int | None = None
    cuts: Sequence[str] | None = None
    microbatches: int = 8
    schedule: str = "gpipe"
    balance: str = "parameters"

    def __post_init__(self):
        stages = check_integer("stages", self.stages, least=2, most=10_000, example=4, optional=True)
        cuts = self.cuts
        if cuts is not None:
            cuts = check_each("cuts", cuts, check_text, "names of layers", example='["block_2", "block_5"]')
            if not cuts:
                raise refusal("cuts", self.cuts, "names of one or more layers", '["block_2", "block_5"]')
        if (stages is None) == (cuts is None):
            number = "Both are given" if cuts is not None else "Neither is given"
            raise ValueError(f"A pipeline is cut by `stages` or by `cuts`. {number}. Write Pipeline(stages=4), say.")
        microbatches = check_integer("microbatches", self.microbatches, most=10_000, example=8)
        if isinstance(self.schedule, str) and self.schedule.lower() == "1f1b":
            raise ValueError(
                'schedule="1f1b" held no less memory than "gpipe" when it was measured on TensorFlow, which runs what '
                'is ready and not what a schedule says. Write schedule="gpipe", and recompute(model, layers) to hold '
                "less."
            )
        checked = {"stages": stages, "cuts": cuts, "microbatches": microbatches}
        checked["schedule"] = check_choice("schedule", self.schedule, SCHEDULES)
        checked["balance"] = check_choice("balance", self.balance, BALANCES)
        if cuts is not None and checked["balance"] != "parameters":
            raise ValueError(
                f"balance={self.balance!r} chooses where the model is cut, and so does cuts={list(cuts)}. Write "
                f"Pipeline(stages={len(cuts) + 1}, balance={self.balance!r}), or leave balance out."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1 if self.cuts is not None else int(self.stages or 0)
