"""Start a training script as several workers on this machine, or as one task of a Slurm or Kubernetes job."""

import argparse
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from keras_paragrad.cli.parser import add_examples, complete_paths, integer, number, refuse

if TYPE_CHECKING:
    from keras_paragrad.distribution.cluster import Cluster

# Limit of processes on one machine, and of GPUs for each.
_MOST = 1024
# A day, in seconds.
_LONGEST_GRACE = 24 * 3600
_USAGE = """%(prog)s --workers N [options] script.py [arguments]
       %(prog)s --workers N [options] -m module [arguments]
       %(prog)s script.py [arguments]          within srun, or in a pod of an Indexed Job"""

_EXAMPLES = """launch --workers 2 train.py --epochs 3
launch --workers 4 --devices-per-worker 1 --max-restarts 3 train.py
launch --workers 2 -m package.train"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `launch`: its own options, then a script or module with its arguments."""
    parser.usage = _USAGE
    add_examples(parser, _EXAMPLES, "guides/launch")
    some, none = integer(1, _MOST), integer(0, _MOST)
    here = parser.add_argument_group("on this machine")
    here.add_argument("--workers", type=some, metavar="N", help="number of workers")
    here.add_argument("--ps", type=none, default=0, metavar="N", help="number of parameter servers; implies a chief")
    here.add_argument("--devices-per-worker", type=some, metavar="N", help="GPUs visible to each worker (default: all)")
    port, restarts = integer(1024, 65535), integer(0, 10**6)
    here.add_argument("--port-base", type=port, metavar="PORT", help="use free ports from this one up (default: any)")
    here.add_argument(
        "--max-restarts", type=restarts, default=0, metavar="N", help="restarts after a failure (default: 0)"
    )
    here.add_argument(
        "--grace-seconds",
        type=number(least=0, most=_LONGEST_GRACE),
        default=30.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL (default: 30)",
    )
    here.add_argument("--all-epochs", action="store_true", help="show all workers' epoch lines, not the first's alone")
    what = parser.add_argument_group("what to start")
    what.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="a module and its arguments"
    )
    complete_paths(what.add_argument("script", nargs=argparse.REMAINDER, help="a script and its arguments"))


def run(arguments: argparse.Namespace) -> int:
    """Starts the processes; returns their exit status, or 2 for wrong arguments. Within a job, becomes the task."""
    from keras_paragrad.distribution.cluster import find_cluster
    from keras_paragrad.distribution.launch.gang import launch
    from keras_paragrad.distribution.launch.tasks import Layout

    try:
        command = _command(arguments.script, arguments.module)
        cluster = find_cluster(os.environ)
        if arguments.workers is None:
            return _exec_task(command, _given_cluster(arguments, cluster), arguments.max_restarts)
        _check_alone(arguments.workers, cluster)
        layout = Layout(arguments.workers, arguments.ps, arguments.devices_per_worker, arguments.port_base)
        return launch(layout, command, arguments.max_restarts, arguments.grace_seconds, arguments.all_epochs)
    except ValueError as error:
        return refuse("launch", error)


def _command(script: list[str], module: list[str] | None) -> list[str]:
    """The command line to start, after checking that the program exists."""
    if module is not None:
        if not module:
            raise ValueError("-m needs a module name, as in: launch --workers 2 -m package.train")
        if PathFinder.find_spec(module[0].partition(".")[0], ["", *sys.path]) is None:
            raise ValueError(f"There is no module named {module[0]!r}, here or among the installed packages.")
        return [sys.executable, "-m", *module]
    script = script[1:] if script[:1] == ["--"] else script
    if not script:
        raise ValueError("No script is given. Name one, as in: launch --workers 2 train.py")
    if not Path(script[0]).is_file():
        raise ValueError(f"There is no script {script[0]!r} in {Path.cwd()}.")
    return [sys.executable, *script]


def _given_cluster(arguments: argparse.Namespace, cluster: "Cluster | None") -> "Cluster":
    """The cluster set up by the scheduler, to which the options of a local cluster don't apply."""
    local = {"--ps": arguments.ps, "--devices-per-worker": arguments.devices_per_worker}
    for option, value in {**local, "--port-base": arguments.port_base}.items():
        if value:
            raise ValueError(f"{option} is for a cluster on this machine. Add --workers N, or leave {option} out.")
    if cluster is None:
        from keras_paragrad.distribution.cluster import sources_in_words

        raise ValueError(
            f"The environment describes no cluster: it has no {sources_in_words()} variables. Write --workers N for N "
            "workers on this machine, or start this as a task of a cluster."
        )
    return cluster


def _check_alone(workers: int, cluster: "Cluster | None") -> None:
    """Checks that this isn't one of several tasks, each of which would start its own cluster."""
    if cluster is not None and sum(map(len, cluster.jobs.values())) > 1:
        raise ValueError(
            f"This process is {cluster.job} {cluster.index} of a cluster described by {cluster.source}, and --workers "
            f"{workers} would start another cluster in each of its tasks. Leave --workers out."
        )


def _exec_task(command: list[str], cluster: "Cluster", max_restarts: int) -> int:
    """Replaces this process by the task's, so that signals and the exit status pass between it and the scheduler."""
    ignored = " --max-restarts has no effect here." if max_restarts else ""
    print(
        f"launch: {cluster.job} {cluster.index} of the cluster described by {cluster.source}; restarts are left to the "
        f"scheduler.{ignored}",
        file=sys.stderr,
        flush=True,
    )
    environment = {**os.environ, "TF_CONFIG": cluster.to_tf_config()}
    os.execve(command[0], command, environment)
