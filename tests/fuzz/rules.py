"""What differs from plain Keras by design: in which cases, what is expected there, and the page that says so."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fuzz.cases import TOKENS, Case
from fuzz.models import ADAPTIVE


class Rule(NamedTuple):
    """A difference by design.

    Attributes:
        page: Below `docs`.
        says: A sentence of that page.
        applies: Whether it is about a case.
        reference: What plain Keras's training is made with instead, of the case.
        summed: Whether plain Keras's embeddings get dense gradients.
        without: What isn't compared: fields of `Trained`, or all.
        warned: What a warning or log message has to say.
    """

    page: str
    says: str
    applies: Callable[[Case], bool]
    reference: dict[str, Any] = {}
    summed: bool = False
    without: tuple[str, ...] = ()
    warned: str = ""


EVERYTHING = ("weights", "history", "evaluate", "predict")


def changes_the_step(case: Case) -> bool:
    """Whether a component changes the training step."""
    names = ("slices", "steps", "recompute", "transform", "devices")
    simplest = {"slices": 0, "steps": 1, "recompute": "nothing", "transform": "none", "devices": "one"}
    return any(case[name] != simplest[name] for name in names) or case["watch"] not in ("nothing", "throughput")


def divides(case: Case) -> bool:
    """Whether a batch is computed in parts."""
    return case["steps"] > 1 or case["slices"] > 0 or case["devices"] not in ("one", "mesh of columns")


def _sums_rows(case: Case) -> bool:
    return (case["steps"] > 1 or case["transform"] != "none") and (
        case["optimizer"] in ADAPTIVE or case["clip"] != "none"
    )


RULES = (
    Rule(
        "guides/data.md",
        "so with such data weights differ from Keras's",
        lambda case: case["data"] == "unknown length" and changes_the_step(case),
        reference={"data": "dataset"},
    ),
    Rule(
        "guides/accumulation.md",
        "They are summed in a dense tensor, so the update is the dense one, as the optimizer's paper has it.",
        lambda case: case["model"] in TOKENS and _sums_rows(case),
        summed=True,
    ),
    Rule(
        "guides/accumulation.md",
        "It normalizes by the statistics of a micro-batch, so its gradient is that of another function.",
        lambda case: "batch norm" in case["model"] and (case["steps"] > 1 or case["slices"] > 0),
        without=EVERYTHING,
        warned="normaliz",
    ),
    Rule(
        "guides/distribution.md",
        "layers that normalize by the batch | Warning.",
        lambda case: case["model"] == "batch norm" and ("shards" in case["devices"] or case["devices"] == "replicas"),
        without=EVERYTHING,
        warned="normaliz",
    ),
    Rule(
        "guides/pipeline.md",
        "warns: its statistics are those of a micro-batch.",
        lambda case: "batch norm" in case["model"] and case["devices"] == "pipeline",
        without=EVERYTHING,
        warned="normaliz",
    ),
    Rule(
        "guides/accumulation.md",
        "a number that the step returns is that of the last micro-batch",
        lambda case: case["step"] not in ("Keras's", "compute_loss") and case["steps"] > 1,
        without=("history",),
    ),
    # What `Training` states of steps of their own is false for a loss that compares rows.
    Rule(
        "guides/accumulation.md",
        "is compared on the rows of its first window, and a difference is warned of",
        lambda case: case["step"] == "guide" and case["loss"] == "pairs" and case["steps"] > 1,
        without=EVERYTHING,
        warned="as stated",
    ),
)


def applying(case: Case) -> list[Rule]:
    return [rule for rule in RULES if rule.applies(case)]
