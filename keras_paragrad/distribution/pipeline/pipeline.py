"""`Pipeline`: how a model is cut into stages."""

from collections.abc import Sequence
from dataclasses import dataclass

from keras_paragrad.arguments import check_each, check_integer, check_text, refusal


@dataclass(frozen=True)
class Pipeline:
    """A strategy for `DistributedFit`: a Functional or Sequential model in stages, one on each device.

    Each device holds the weights, gradients and optimizer state of its stage, and computes it. A batch passes the
    stages in micro-batches, several of them at once (GPipe). Training is the same as on one device with whole batches:
    micro-batches are weighted by their loss divisors, and metrics see every example.

    Args:
        stages: The number of stages. The model is cut so that the largest stage, by the bytes of its weights, is about
            as small as possible, and few tensors cross the cuts.
        cuts: Instead of `stages`, the names of the layers that end a stage, all but the last, in order.
        microbatches: The number of micro-batches that a batch is cut into. Sizes differ by one example at most.

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
        checked = {"stages": stages, "cuts": cuts, "microbatches": microbatches}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1 if self.cuts is not None else int(self.stages or 0)
