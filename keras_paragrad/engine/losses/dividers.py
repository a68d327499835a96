"""`Divider`: describes, for errors, a component that divides batches into parts."""

import dataclasses

INSTEAD_OF_WINDOWS = (
    "For any loss, give fit() the whole batch, compile with the inner optimizer, and write "
    "keras_paragrad.microbatch(model, size=...), which computes the loss on the outputs of all slices."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divider:
    """Describes a component that divides batches into parts. It is all that the engine knows of the component.

    Advice goes into errors as it stands: a sentence, or a clause without a period.

    Attributes:
        configured_by: The call that takes a `weighting`.
        parts: What the parts of a batch are called.
        for_equal_parts: A clause: what to write if all parts have the same size and weights.
        to_train_anyway: A clause: what to write for a model that mixes examples; `None` if nothing would help.
        divides_calls: Whether calls of layers can be divided in place of the loss.
        divides_steps: Whether a custom `train_step` is divided.
        takes_weighting: Whether a `weighting` can be stated.
        whole_batches: A sentence: what trains on whole batches instead.
        for_any_loss: A sentence: what takes any loss.
    """

    configured_by: str
    parts: str
    for_equal_parts: str
    to_train_anyway: str | None
    divides_calls: bool = False
    divides_steps: bool = False
    takes_weighting: bool = True
    whole_batches: str = "keras_paragrad.memory.recompute(model) saves memory with whole batches."
    for_any_loss: str = "recompute() saves memory for any loss."
