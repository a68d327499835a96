"""A case of `gpu.py`: a function that returns a line, and what it may know of the machine."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
# What became of a case. Of these, all but the first three make the run fail.
HOLDS, MEASURED, REFUSED = "holds", "measured", "refused"
FAILS, RAISED, TIMED_OUT, CRASHED, EMPTY, NOT_RUN = "FAILS", "raised", "timed out", "crashed", "empty", "not run"
PASSED = (HOLDS, MEASURED, REFUSED)


@dataclass(frozen=True)
class Line:
    """What a case found.

    Attributes:
        text: A sentence for readers.
        outcome: One of the constants of this module.
        values: The numbers behind the sentence, as JSON's types.
        seconds: How long the case took.
        since: What has changed since it was run, for a page that is written before it is run again.
    """

    text: str
    outcome: str = MEASURED
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    since: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The line as JSON's types."""
        return asdict(self)


def check(error: float, limit: float, what: str = "") -> Line:
    """A line that holds if an error is within its limit; NaN isn't."""
    text = f"{error:.1e}, at most {limit:.0e}{what and f'; {what}'}"
    return Line(text, HOLDS if error <= limit else FAILS, {"error": float(error), "limit": float(limit)})


@dataclass(frozen=True)
class Machine:
    """Where the cases run.

    Attributes:
        cpu: Whether this is the small form on CPUs.
        devices: The logical devices to train on, as TensorFlow names them: `GPU:0`.
        memory_bytes: The memory of a card, or `None` if it isn't known.
        eager: Whether steps run without graphs, which take longer to make than to run a few times.
    """

    cpu: bool
    devices: tuple[str, ...] = ()
    memory_bytes: int | None = None
    eager: bool = False

    def size(self, gpu: T, cpu: T) -> T:
        """The first on a GPU, and the second in the small form on CPUs."""
        return cpu if self.cpu else gpu


@dataclass(frozen=True)
class Case:
    """A function that returns a `Line`.

    Attributes:
        name: What the line is called.
        run: The function; gets the `Machine` and the arguments.
        arguments: Its keyword arguments.
        seconds: Its time limit.
        small: Whether the small form runs it: the first variant of its function.
    """

    name: str
    run: Callable[..., Line | None]
    arguments: dict[str, Any]
    seconds: float
    small: bool


class Cases(list[Case]):
    """The cases of a module, which `@cases(name)` adds in order."""

    def __call__(
        self,
        name: str,
        seconds: float = 60,
        variants: dict[str, dict[str, Any]] | None = None,
        *,
        small: bool = True,
    ) -> Callable[[Callable], Callable]:
        """Adds the decorated function, once for each variant.

        Args:
            name: The case's name; `{}` in it stands for the variant's.
            seconds: The time limit of each.
            variants: By name, keyword arguments of the function.
            small: Whether the first of them is in the small form.
        """

        def add(function: Callable) -> Callable:
            for place, (variant, arguments) in enumerate((variants or {"": {}}).items()):
                self.append(Case(name.format(variant), function, arguments, seconds, small and place == 0))
            return function

        return add
