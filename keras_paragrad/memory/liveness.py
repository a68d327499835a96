"""Simulates the peak memory of a traced graph: follows its operations in order, without computing anything.

A tensor is known by its number in its `Block`, which is a graph or a function that it calls.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from keras_paragrad.compat.operations import SAME_BUFFER
from keras_paragrad.memory.blocks import Block, TracedOperation

# Operations whose output is the buffer of their first input.
ALIASES = SAME_BUFFER | {"Bitcast", "TensorListGetItem", "TensorListResize"}
# Operations that overwrite an input that nothing else reads.
_IN_PLACE = frozenset(
    {"Add", "AddV2", "AddN", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "Maximum", "Minimum", "Pow", "BiasAdd", "Cast"}
    | {"SquaredDifference", "Neg", "Abs", "Sqrt", "Rsqrt", "Square", "Exp", "Expm1", "Log", "Log1p", "Reciprocal"}
    | {"Erf", "Erfc", "Tanh", "Sigmoid", "Softplus", "Softsign", "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Softmax"}
    | {"LogSoftmax", "ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "TanhGrad", "SigmoidGrad"}
    | {"SqrtGrad", "RsqrtGrad", "InvGrad", "ReciprocalGrad", "SoftplusGrad", "SoftsignGrad", "Select", "SelectV2"}
    | {"LogicalAnd", "LogicalOr", "LogicalNot", "ClipByValue", "Sign", "Floor", "Round", "TensorScatterAdd"}
)
_SCALARS: dict[str, Callable[[Any, Any], int | bool]] = {
    **{"Add": operator.add, "AddV2": operator.add, "Sub": operator.sub, "Mul": operator.mul},
    **{"Less": operator.lt, "LessEqual": operator.le, "Greater": operator.gt, "GreaterEqual": operator.ge},
    **{"Equal": operator.eq, "NotEqual": operator.ne, "Minimum": min, "Maximum": max, "FloorDiv": operator.floordiv},
}
_SAME_SCALAR = SAME_BUFFER | {"Cast", "Max", "Min", "Sum", "Prod"}
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# Operations on a weight that don't gather it: aliases, casts and lookups of rows.
_WITHOUT_GATHER = ALIASES | _CALLS | {"Cast", "ReadVariableOp", "ResourceGather", "VariableShape"}
# A loop is assumed to be steady after this many iterations without growth.
_STEADY = 3


class Peaks(NamedTuple):
    """The peaks of a training step, without variables.

    Attributes:
        activations: Peak bytes of all tensors except the variables' gradients, while the first 0, 1, 2, ... of these
            gradients exist.
        gradients: Numbers of the gradients in the order in which they become available.
        update: Peak bytes of such tensors during the optimizer's update.
    """

    activations: list[int]
    gradients: list[int]
    update: int


class _Buffer:
    """Memory that several tensors may share.

    `owners` counts what needs it: uses to come, and lists of tensors; without any, it is freed. `parts` are the buffers
    that a list keeps alive. `is_gradient` excludes it from the activations.
    """

    __slots__ = ("is_gradient", "owners", "parts", "size")

    def __init__(self, size: int, parts: Sequence["_Buffer"] = ()):
        self.size, self.parts, self.owners, self.is_gradient = size, parts, 1, False


class _Value(NamedTuple):
    """A tensor: its buffer, if it has one, and its value, if it is a known integer or boolean.

    A weight that is gathered where it is used has no buffer, but `gathered`, its bytes.
    """

    buffer: _Buffer | None
    known: int | bool | None = None
    gathered: int = 0


def step_peaks(
    block: Block, gradients: Sequence[int], updates_from: int, gathered: Mapping[int | None, int] | None = None
) -> Peaks:
    """The peaks of a training step.

    Args:
        block: The step: forward, backward and update.
        gradients: Numbers of the variables' gradients.
        updates_from: Index of the update's first operation.
        gathered: Bytes of sharded variables, gathered where they are used, by the number of the input that each is read
            from.

    Returns:
        The peaks. Gradients are assumed to live until the update, which starts when all of them exist.
    """
    return _Execution(frozenset(gradients)).step(block, updates_from, gathered or {})


class _Execution:
    """Follows the operations of a step.

    Attributes:
        _gradients: Numbers of the variables' gradients.
        _live: Bytes of the buffers that are allocated now, except gradients.
        _peak: Peak of these since the latest gradient arrived.
        _before: The peak before the results of the current operation.
        _arrived, _peaks: The numbers of the gradients so far, and the peaks before each.
    """

    def __init__(self, gradients: frozenset[int]):
        self._gradients = gradients
        self._step: Block | None = None
        self._live = self._peak = self._before = 0
        self._arrived: list[int] = []
        self._peaks: list[int] = []

    def step(self, block: Block, updates_from: int, gathered: Mapping[int | None, int]) -> Peaks:
        """Follows a step; the arguments are as in `step_peaks`."""
        self._step = block
        inputs = zip(block.inputs, block.input_sizes, strict=True)
        arguments = [_Value(self._allocate(size), gathered=gathered.get(number, 0)) for number, size in inputs]
        values = self._begin(block, arguments)
        for operation in block.operations[:updates_from]:
            self._execute(block, operation, values)
        self._peaks.append(self._peak)
        self._peak = self._live
        # The update works on shards, and gathers no weights.
        values = {number: _Value(value.buffer, value.known) for number, value in values.items()}
        for operation in block.operations[updates_from:]:
            self._execute(block, operation, values)
        return Peaks(self._peaks, self._arrived, self._peak if updates_from < len(block.operations) else 0)

    def _arrive(self, number: int, buffer: _Buffer | None, is_new: bool) -> None:
        """Counts a buffer among the gradients from now on; `is_new` if the current operation has allocated it."""
        if buffer is None or buffer.is_gradient:
            return
        buffer.is_gradient = True
        self._live -= buffer.size
        # A new buffer has never been counted among the activations.
        self._peaks.append(max(self._before, self._live) if is_new else self._peak)
        self._peak = self._live
        self._arrived.append(number)

    def _begin(self, block: Block, arguments: list[_Value]) -> dict[int, _Value]:
        """The values of a block's inputs by number, owned by their uses in the block, and no longer by the caller."""
        values = dict(zip(block.inputs, arguments, strict=True))
        for number, value in values.items():
            self._keep(value.buffer, block.uses[number])
            self._release(value.buffer)
        return values

    def _call(self, block: Block, arguments: list[_Value]) -> list[_Value]:
        """Follows a function, which owns its arguments; the caller owns its results."""
        values = self._begin(block, arguments)
        for operation in block.operations:
            self._execute(block, operation, values)
        return [values[number] for number in block.outputs]

    def _execute(self, block: Block, operation: TracedOperation, values: dict[int, _Value]) -> None:
        """Simulates an operation: allocates its results, and frees the inputs that it uses last."""
        inputs = [values[number] for number in operation.inputs]
        gathered = 0
        if operation.kind not in _WITHOUT_GATHER:
            gathered = sum(values[number].gathered for number in {*operation.inputs})
            # Weights are gathered before a loop or branch, not in it.
            inputs = [_Value(value.buffer, value.known) for value in inputs]
        self._live += gathered
        self._peak = max(self._peak, self._live)
        self._before, live = self._peak, self._live
        results = self._control(operation, inputs) if operation.blocks else self._plain(operation, inputs)
        is_new = self._live > live and not operation.blocks
        for number, result in zip(operation.outputs, results, strict=False):
            if block is self._step and number in self._gradients:
                self._arrive(number, result.buffer, is_new)
            values[number] = result
            self._keep(result.buffer, block.uses[number])
            self._release(result.buffer)
        if not operation.blocks:
            for value in inputs:
                self._release(value.buffer)
        self._live -= gathered

    def _plain(self, operation: TracedOperation, inputs: list[_Value]) -> list[_Value]:
        """The results of an operation without branches or loops, in new memory or in an input's buffer."""
        kind, known = operation.kind, known_value(operation, [value.known for value in inputs])
        if kind.startswith("TensorList") and (lists := self._of_list(kind, inputs)) is not None:
            return lists
        if kind == "IdentityN":
            return [_Value(self._keep(value.buffer), value.known, value.gathered) for value in inputs]
        if inputs and inputs[0].gathered and kind in ("Cast", "ReadVariableOp", *ALIASES):
            # Still to be gathered where it is used.
            return [_Value(None, known, operation.sizes[0] or inputs[0].gathered)]
        if kind in ALIASES:
            return [_Value(self._keep(inputs[0].buffer), known)]
        if kind in ("ReadVariableOp", "Const"):
            # Constants belong to the graph, and variables are counted elsewhere.
            return [_Value(None, known)]
        if kind in _IN_PLACE:
            for value in inputs:
                if self._is_free(value.buffer, operation.sizes[0], inputs):
                    return [_Value(self._keep(value.buffer), known)]
        return [_Value(self._allocate(size), known) for size in operation.sizes]

    @staticmethod
    def _is_free(buffer: _Buffer | None, size: int, inputs: list[_Value]) -> bool:
        """Whether an operation may write a result of `size` bytes to an input's buffer, as nothing else will use it."""
        if buffer is None or buffer.size != size or buffer.parts:
            return False
        return buffer.owners == sum(value.buffer is buffer for value in inputs)

    def _of_list(self, kind: str, inputs: list[_Value]) -> list[_Value] | None:
        """The results of an operation on a list of tensors, or `None` if it copies.

        A list links the previous list and the added tensor, keeps both alive, and shares them with the previous list.
        """
        if kind in ("TensorListReserve", "TensorListLength", "TensorListElementShape"):
            return [_Value(None)]
        if kind == "TensorListFromTensor":
            return [_Value(self._linked(None, inputs[0].buffer))]
        if kind in ("TensorListPushBack", "TensorListSetItem"):
            return [_Value(self._linked(inputs[0].buffer, inputs[1 if kind == "TensorListPushBack" else 2].buffer))]
        if kind not in ("TensorListPopBack", "TensorListGetItem"):
            return None
        # The buffers of the previous list and of the added tensor, if they are known.
        before, added = inputs[0].buffer.parts if inputs[0].buffer and inputs[0].buffer.parts else (None, None)
        item = _Value(self._keep(added))
        return [item] if kind == "TensorListGetItem" else [_Value(self._keep(before)), item]

    def _linked(self, before: _Buffer | None, added: _Buffer | None) -> _Buffer:
        empty = _Buffer(0)
        return _Buffer(0, (self._keep(before) or empty, self._keep(added) or empty))

    def _control(self, operation: TracedOperation, inputs: list[_Value]) -> list[_Value]:
        """The results of a loop, a branch or a call."""
        if operation.kind in ("While", "StatelessWhile"):
            condition, body = operation.blocks
            return self._loop(condition, body, inputs)
        if operation.kind in ("If", "StatelessIf", "Case", "StatelessCase"):
            choice, *arguments = inputs
            # It is seldom known which branch runs: take the largest, such as an update.
            branch = max(operation.blocks, key=lambda block: len(block.operations))
            if choice.known is not None:
                index = int(choice.known) if "Case" in operation.kind else int(not choice.known)
                branch = operation.blocks[index]
            self._release(choice.buffer)
            return self._call(branch, arguments)
        return self._call(operation.blocks[0], inputs)

    def _loop(self, condition: Block, body: Block, state: list[_Value]) -> list[_Value]:
        """Runs a loop until its memory no longer grows, or its condition is known to be false."""
        steady, before = 0, self._live
        while steady < _STEADY:
            for value in state:
                self._keep(value.buffer)
            (proceed,) = self._call(condition, state)
            self._release(proceed.buffer)
            if proceed.known is False:
                return state
            state = self._call(body, state)
            if proceed.known is None:
                break
            steady = steady + 1 if self._live == before else 0
            before = self._live
        return [_Value(value.buffer) for value in state]

    def _allocate(self, size: int) -> _Buffer | None:
        if not size:
            return None
        self._live += size
        self._peak = max(self._peak, self._live)
        return _Buffer(size)

    @staticmethod
    def _keep(buffer: _Buffer | None, owners: int = 1) -> _Buffer | None:
        if buffer is not None:
            buffer.owners += owners
        return buffer

    def _release(self, buffer: _Buffer | None) -> None:
        """Drops one owner of a buffer; the last owner frees it and its parts."""
        pending = [buffer]
        while pending:
            dropped = pending.pop()
            if dropped is None:
                continue
            dropped.owners -= 1
            if dropped.owners == 0:
                self._live -= 0 if dropped.is_gradient else dropped.size
                pending += dropped.parts


def known_value(operation: TracedOperation, values: Sequence[int | bool | None]) -> int | bool | None:
    """The value of an integer or boolean, if it follows from the values of the inputs."""
    if operation.value is not None:
        return operation.value
    kind = operation.kind
    if kind in ("LogicalAnd", "LogicalOr"):
        known = [value for value in values if value is not None]
        dominant = kind == "LogicalOr"
        return None if not known else dominant if dominant in known else not dominant
    if kind == "LogicalNot":
        return None if values[0] is None else not values[0]
    if kind in _SAME_SCALAR:
        return values[0]
    if kind in _SCALARS and None not in values:
        return _SCALARS[kind](*values)
    return None
