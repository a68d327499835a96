"""Print the plan for this machine."""

import argparse
import functools
import json
import re
from typing import TYPE_CHECKING, Any

from keras_paragrad.arguments import LARGEST, MOST_PARTS, quote
from keras_paragrad.cli.parser import add_examples, finite_number, integer, print_error
from keras_paragrad.cli.waiting import while_waiting
from keras_paragrad.distribution.decision import (
    COMMUNICATIONS,
    LAYOUTS,
    LONGEST_WAIT,
    SHARD_POLICIES,
    SHARDS,
    STRATEGIES,
    WEIGHTINGS,
)

if TYPE_CHECKING:
    from keras_paragrad.distribution.options import Options

_EXAMPLES = """explain
explain --all
explain --shard parameters
explain --mesh batch=2,model=2 --layout auto
explain --stages 4 --microbatches 8"""
JIT: dict[str, str | bool] = {"auto": "auto", "true": True, "false": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `explain`: the arguments of `DistributedFit`."""
    add_examples(parser, _EXAMPLES, "guides/plan")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--all", action="store_true", help="print each decision, why, and how to change it")
    shown.add_argument("--json", action="store_true", help="print the plan as JSON")
    _add_options(parser.add_argument_group("arguments of DistributedFit"))


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; returns 0, or 2 if the arguments are wrong, or contradict the machine."""
    return while_waiting("explain", lambda _: _print_plan(arguments))


def _print_plan(arguments: argparse.Namespace) -> int:
    """Makes and prints the plan; returns the exit status."""
    import keras_paragrad.compat  # noqa: F401  (checks the installed Keras and TensorFlow)
    from keras_paragrad.distribution.hardware import detect
    from keras_paragrad.distribution.plan import Explanation, make_plan, summary_lines
    from keras_paragrad.plain_text import show

    try:
        hardware = detect()
        plan = make_plan(hardware, _options(arguments))
    except ValueError as error:
        return print_error("explain", error)
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=2))
    elif arguments.all:
        show(Explanation(plan, hardware))
    else:
        print(*summary_lines(plan, hardware), "Each decision, and how to change it: --all", sep="\n")
    return 0


def _add_options(group: Any) -> None:
    """Declares an option for each argument of `DistributedFit`."""
    # Options that aren't given are left to the defaults of `Options`.
    option = functools.partial(group.add_argument, default=argparse.SUPPRESS)
    option("--strategy", choices=STRATEGIES, help="how replicas are spread over devices and workers")
    option("--devices", type=_names, metavar="GPU:0,GPU:1", help="devices of a process (default: all)")
    option(
        "--stages",
        type=integer(2, LARGEST),
        metavar="N",
        help="Pipeline(stages=N): cuts the model, with --microbatches",
    )
    option("--microbatches", type=integer(1, LARGEST), metavar="N", help="Pipeline(microbatches=N), which cuts batches")
    option("--mesh", type=_axes, metavar="batch=2,model=2", help="a mesh of devices in place of a strategy")
    option("--layout", choices=LAYOUTS[1:], help="with --mesh, how weights are split")
    option("--communication", choices=COMMUNICATIONS, help="how gradients are all-reduced")
    option("--jit", choices=JIT, help="whether XLA compiles steps")
    option("--precision", metavar="POLICY", help="dtype policy of models, such as mixed_bfloat16")
    option("--inexact", dest="exact", action="store_false", help="exact=False: need not be the step of one device")
    option("--weighting", choices=WEIGHTINGS, help="what a custom compute_loss divides by")
    option("--unproved", dest="prove", action="store_false", help="prove=False: the first batch proves nothing")
    parts = integer(2, MOST_PARTS)
    option("--deterministic", type=parts, metavar="PARTS", help="the same bits on any number of devices")
    option("--shard-policy", choices=SHARD_POLICIES, help="how workers share the data")
    option("--min-shard-bytes", type=integer(1, LARGEST), metavar="BYTES", help="smaller variables stay whole")
    option("--shard", choices=SHARDS[1:], help="what each replica holds a shard of")
    option("--fit-memory", action="store_true", help="recompute, slice and shard as the devices' memory asks for")
    option("--device-bytes", type=integer(1, LARGEST), metavar="BYTES", help="a device's memory, for --fit-memory")
    option("--pack-bytes", type=integer(0, LARGEST), metavar="BYTES", help="gradients that are all-reduced together")
    seconds = finite_number(least=1, most=LONGEST_WAIT)
    option("--startup-timeout", type=seconds, metavar="SECONDS", help="time to wait for other workers at the start")
    option("--collective-timeout", type=seconds, metavar="SECONDS", help="time until a collective without them fails")


def _names(text: str) -> list[str]:
    return text.split(",")


def _axes(text: str) -> dict[str, int]:
    """For `add_argument(type=...)`: reads the sizes of a mesh's axes."""
    axes = [re.fullmatch(r"([a-z]+)=([0-9]{1,6})", axis) for axis in text.split(",")]
    if not all(axes):
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a mesh; expected one such as batch=2,model=2")
    return {axis[1]: int(axis[2]) for axis in axes if axis}


def _options(arguments: argparse.Namespace) -> "Options":
    """The arguments of `DistributedFit` that were given; others keep their defaults."""
    from keras_paragrad.distribution.options import Options

    options: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name in Options.__dataclass_fields__
    }
    if "jit" in options:
        options["jit"] = JIT[options["jit"]]
    pipeline = {name: getattr(arguments, name) for name in ("stages", "microbatches") if name in arguments}
    if pipeline:
        from keras_paragrad.distribution import Pipeline

        if len(pipeline) < 2:
            raise ValueError(f"--{next(iter(pipeline))} is one half of a pipeline. Give --stages and --microbatches.")
        if "strategy" in options:
            raise ValueError("A pipeline is a strategy. Leave --strategy out, or --stages and --microbatches.")
        options["strategy"] = Pipeline(**pipeline)
    return Options(**options)
