"""Print the plan for this machine, or for one that the options describe."""

import argparse
import functools
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from keras_paragrad.arguments import LARGEST, quote
from keras_paragrad.cli.parser import integer, number
from keras_paragrad.distribution.decisions import (
    BATCHES,
    COMMUNICATIONS,
    LONGEST_WAIT,
    LR_SCALINGS,
    MOST_DESCRIBED,
    SHARD_POLICIES,
    SHARDS,
    STRATEGIES,
)

if TYPE_CHECKING:
    from keras_paragrad.distribution.hardware import Hardware
    from keras_paragrad.distribution.options import Options

JIT: dict[str, str | bool] = {"auto": "auto", "true": True, "false": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `explain`: a machine, and those of `DistributedFit`."""
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    machine = parser.add_argument_group("another machine")
    some, none = integer(1, MOST_DESCRIBED), integer(0, MOST_DESCRIBED)
    machine.add_argument("--cpus", type=some, metavar="N", help="processors")
    machine.add_argument("--logical-cpus", type=some, metavar="N", help="logical CPU devices")
    machine.add_argument("--gpus", type=none, metavar="N", help="GPUs of each worker")
    gigabytes = number(above=0, most=MOST_DESCRIBED)
    machine.add_argument("--gpu-memory-gb", type=gigabytes, metavar="GB", help="memory of each GPU, in GiB")
    machine.add_argument("--compute-capability", type=_capability, metavar="X.Y", help="of each GPU, such as 9.0")
    machine.add_argument("--tpu", dest="tpu_cores", type=none, const=8, nargs="?", metavar="N", help="a TPU of N cores")
    machine.add_argument("--workers", type=some, metavar="N", help="number of workers, each on such a machine")
    machine.add_argument("--ps", type=none, metavar="N", help="number of parameter servers; implies a chief")
    _add_options(parser.add_argument_group("arguments of DistributedFit"))


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; returns 0, or 2 if the arguments are wrong, or contradict the machine."""
    import keras_paragrad.compat  # noqa: F401  (checks the installed Keras and TensorFlow)
    from keras_paragrad.distribution.plan import Explanation, make_plan
    from keras_paragrad.plain_text import show

    try:
        hardware = _machine(arguments)
        plan = make_plan(hardware, _options(arguments))
    except ValueError as error:
        print(f"explain: error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        show(Explanation(plan, hardware))
    return 0


def _add_options(group: Any) -> None:
    """Declares an option for each argument of `DistributedFit`."""
    # What isn't given is left to the defaults of `Options`.
    option = functools.partial(group.add_argument, default=argparse.SUPPRESS)
    option("--strategy", choices=STRATEGIES)
    option("--devices", type=lambda text: text.split(","), metavar="CPU:0,CPU:1")
    option("--communication", choices=COMMUNICATIONS)
    option("--jit", choices=JIT)
    option("--precision", metavar="POLICY")
    option("--batch", choices=BATCHES)
    option("--lr-scaling", choices=LR_SCALINGS[1:])
    option("--warmup-steps", type=integer(0, LARGEST), metavar="N")
    option("--inexact", dest="exact", action="store_false", help="exact=False")
    option("--shard-policy", choices=SHARD_POLICIES)
    option("--shard", choices=SHARDS[1:])
    option("--device-bytes", type=integer(1, LARGEST), metavar="BYTES", help="for --shard auto")
    option("--pack-bytes", type=integer(0, LARGEST), metavar="BYTES")
    option("--collective-timeout", type=number(least=1, most=LONGEST_WAIT), metavar="SECONDS")


def _machine(arguments: argparse.Namespace) -> "Hardware":
    """The described machine, or this one."""
    from keras_paragrad.distribution.hardware import describe, detect

    names = ("cpus", "logical_cpus", "gpus", "gpu_memory_gb", "compute_capability", "tpu_cores", "workers", "ps")
    description = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return describe(**description) if description else detect()


def _options(arguments: argparse.Namespace) -> "Options":
    from keras_paragrad.distribution.options import Options

    options: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name in Options.__dataclass_fields__
    }
    if "jit" in options:
        options["jit"] = JIT[options["jit"]]
    return Options(**options)


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,2})?", text):
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a compute capability; expected one such as 9.0")
    return int(major), int(minor or 0)
