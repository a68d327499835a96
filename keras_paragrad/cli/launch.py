"""Start a training script as several workers, on this machine or several, or as a task of a Slurm or Kubernetes job."""

import argparse
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_paragrad.arguments import quote
from keras_paragrad.cli.parser import add_examples, finite_number, integer, integer_range, print_error

if TYPE_CHECKING:
    from keras_paragrad.distribution.cluster import Cluster
    from keras_paragrad.distribution.launch.nodes import RendezvousSettings

# Limit of processes on one machine, and of GPUs for each.
_MOST = 1024
# A day, in seconds.
_LONGEST_GRACE = 24 * 3600
_TOKEN, _SHORTEST_TOKEN = "KERAS_PARAGRAD_TOKEN", 16
# Seconds to wait for machines that haven't joined.
_STARTUP = _WAIT = 600.0
# Seconds before lost workers are started again; doubled each time.
_REGROW = 60.0
# The default number of restarts if the number of workers may change.
_RESTARTS = 10
_USAGE = """%(prog)s --workers N [options] script.py [arguments]
       %(prog)s --workers N [options] -m module [arguments]
       %(prog)s --nodes N --node-rank R --rendezvous HOST:PORT [options] script.py [arguments]
       %(prog)s script.py [arguments]          within srun, or in a pod of an Indexed Job"""

_EXAMPLES = """launch --workers 2 train.py --epochs 3
launch --workers 4 --devices-per-worker 1 --max-restarts 3 train.py
launch --workers 2:4 --max-restarts 20 train.py
launch --workers 2 -m package.train
launch --nodes 2 --node-rank 0 --rendezvous 10.0.0.5:29500 train.py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `launch`: its own options, then a script or module with its arguments."""
    parser.usage = _USAGE
    add_examples(parser, _EXAMPLES, "guides/launch")
    positive, nonnegative = integer(1, _MOST), integer(0, _MOST)
    here = parser.add_argument_group("on this machine")
    here.add_argument(
        "--workers", type=integer_range(1, _MOST), metavar="N", help="number of workers, or 2:4 for two to four"
    )
    here.add_argument(
        "--ps", type=nonnegative, default=0, metavar="N", help="number of parameter servers; implies a chief"
    )
    here.add_argument(
        "--devices-per-worker", type=positive, metavar="N", help="GPUs visible to each worker (default: all)"
    )
    port, restarts = integer(1024, 65535), integer(0, 10**6)
    here.add_argument("--port-base", type=port, metavar="PORT", help="use free ports from this one up (default: any)")
    here.add_argument(
        "--max-restarts",
        type=restarts,
        metavar="N",
        help=f"restarts after a failure (default: 0, or {_RESTARTS} if the number of workers or machines may change)",
    )
    here.add_argument(
        "--regrow-seconds",
        type=finite_number(least=0, most=_LONGEST_GRACE),
        metavar="S",
        help=f"with --workers 2:4, when lost ones are started again; 0 for never (default: {_REGROW:g}, then doubled)",
    )
    here.add_argument(
        "--grace-seconds",
        type=finite_number(least=0, most=_LONGEST_GRACE),
        default=30.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL (default: 30)",
    )
    here.add_argument(
        "--log-dir", metavar="DIR", help="where all workers but the first print (default: a temporary directory)"
    )
    _add_nodes(parser.add_argument_group("on several machines, with this command on each, in any order"))
    program = parser.add_argument_group("what to start")
    program.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="a module and its arguments"
    )
    program.add_argument("script", nargs=argparse.REMAINDER, help="a script and its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Starts the processes; returns their exit status, or 2 for wrong arguments. Within a job, becomes the task."""
    from keras_paragrad.distribution.cluster import find_cluster
    from keras_paragrad.distribution.launch.tasks import Layout
    from keras_paragrad.distribution.launch.worlds import Supervision, launch

    try:
        command = _command(arguments.script, arguments.module)
        cluster = find_cluster(os.environ)
        rendezvous = _rendezvous(arguments)
        if rendezvous is None and arguments.workers is None:
            return _exec_task(command, _given_cluster(arguments, cluster), arguments.max_restarts or 0)
        _check_alone(f"--workers {arguments.workers}" if rendezvous is None else f"--nodes {arguments.nodes}", cluster)
        # How many workers, or with a rendezvous machines, there may be.
        allowed = arguments.workers if rendezvous is None else arguments.nodes
        may_change = allowed.least < allowed.most
        if arguments.ps and may_change:
            raise ValueError(
                f"--workers {allowed} goes without parameter servers. Leave --ps out, or write one number."
            )
        if arguments.regrow_seconds is not None and not may_change:
            raise ValueError("--regrow-seconds is for a number of workers that may change, as in --workers 2:4.")
        restarts = _RESTARTS if may_change else 0
        supervision = Supervision(
            least=allowed.least,
            max_restarts=restarts if arguments.max_restarts is None else arguments.max_restarts,
            grace=arguments.grace_seconds,
            regrow=_REGROW if arguments.regrow_seconds is None else arguments.regrow_seconds,
            log_dir=arguments.log_dir,
        )
        workers = allowed.most if rendezvous is None else arguments.workers_per_node or 1
        world = str(allowed) if may_change else None
        layout = Layout(workers, arguments.ps, arguments.devices_per_worker, arguments.port_base, world=world)
        return launch(layout, command, supervision, rendezvous)
    except ValueError as error:
        return print_error("launch", error)
    except OSError as error:
        return print_error("launch", error, 1)


def _add_nodes(several: Any) -> None:
    """Declares the options of several machines."""
    several.add_argument(
        "--nodes", type=integer_range(1, _MOST), metavar="N", help="number of machines, or 1:4 for one to four"
    )
    several.add_argument("--node-rank", type=integer(0, _MOST - 1), metavar="R", help="which this one is, from 0")
    several.add_argument(
        "--rendezvous", type=_address, metavar="HOST:PORT", help="where they meet: node 0's address, and a free port"
    )
    several.add_argument(
        "--workers-per-node", type=integer(1, _MOST), metavar="N", help="number of workers on this machine (default: 1)"
    )
    several.add_argument(
        "--token-file", metavar="FILE", help=f"a file with the token that they share (default: in {_TOKEN})"
    )
    several.add_argument(
        "--node-address", metavar="HOST", help="this machine's address for the others (default: by which it connects)"
    )
    several.add_argument(
        "--startup-timeout",
        type=finite_number(least=1, most=_LONGEST_GRACE),
        metavar="S",
        help=f"seconds to wait for all machines (default: {_STARTUP:g})",
    )
    several.add_argument(
        "--wait",
        type=finite_number(least=1, most=_LONGEST_GRACE),
        metavar="S",
        help=f"seconds to wait once too few machines are left; then the exit status is 75 (default: {_WAIT:g})",
    )


def _rendezvous(arguments: argparse.Namespace) -> "RendezvousSettings | None":
    """How the machines meet; `None` without `--nodes`."""
    several = ("node_rank", "rendezvous", "workers_per_node", "token_file", "node_address", "startup_timeout", "wait")
    given = [f"--{name.replace('_', '-')}" for name in several if getattr(arguments, name) is not None]
    if arguments.nodes is None:
        if given:
            raise ValueError(f"{given[0]} is for several machines. Add --nodes N, or leave {given[0]} out.")
        return None
    if arguments.node_rank is None or arguments.rendezvous is None:
        raise ValueError(
            "--nodes needs the rank of this machine, from 0, and the address of node 0, where all meet: "
            f"launch --nodes {arguments.nodes} --node-rank 0 --rendezvous HOST:29500 train.py"
        )
    if arguments.node_rank >= arguments.nodes.most:
        raise ValueError(f"--node-rank is {arguments.node_rank}, and must be from 0 to {arguments.nodes.most - 1}.")
    alone = {"--workers": arguments.workers, "--ps": arguments.ps, "--regrow-seconds": arguments.regrow_seconds}
    instead = {"--workers": "Write --workers-per-node N."}
    for option, value in alone.items():
        if value:
            raise ValueError(f"{option} is for one machine. {instead.get(option, 'Leave it out, or --nodes.')}")
    from keras_paragrad.distribution.launch.nodes import RendezvousSettings

    return RendezvousSettings(
        least=arguments.nodes.least,
        most=arguments.nodes.most,
        rank=arguments.node_rank,
        address=arguments.rendezvous,
        token=_token(arguments.token_file),
        seconds=arguments.startup_timeout or _STARTUP,
        again=arguments.wait or _WAIT,
        host=arguments.node_address,
    )


def _address(word: str) -> str:
    """For `add_argument(type=...)`: reads `host:port`."""
    from keras_paragrad.distribution.cluster import is_address

    if not is_address(word):
        raise argparse.ArgumentTypeError(
            f"{quote(word)} is not a host and a port from 1 to 65535, such as 10.0.0.5:29500"
        )
    return word


def _token(file: str | None) -> str:
    """Reads the token that the machines share, from `--token-file` or else from the environment."""
    if file is None:
        token, where = os.environ.get(_TOKEN, ""), _TOKEN
    else:
        try:
            token, where = Path(file).read_text(encoding="utf-8"), file
        except (OSError, ValueError) as error:
            raise ValueError(f"The token can't be read from {quote(file)}: {error}") from None
    token = token.strip()
    if len(token) < _SHORTEST_TOKEN:
        state = f"has {len(token)} characters" if token else "is empty" if file else "is not set"
        raise ValueError(
            f"{where} {state}. The machines sign their messages with a token of at least {_SHORTEST_TOKEN} characters, "
            "which is the same on all: type `openssl rand -hex 16 > token` once, copy the file to each, and add "
            "--token-file token."
        )
    return token


def _command(script: list[str], module: list[str] | None) -> list[str]:
    """The command line of the script or module to start, after checking that it exists."""
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
            "workers on this machine, --nodes N for N machines, or start this as a task of a cluster."
        )
    return cluster


def _check_alone(option: str, cluster: "Cluster | None") -> None:
    """Checks that this isn't one of several tasks: each task would start a separate cluster."""
    if cluster is not None and sum(map(len, cluster.jobs.values())) > 1:
        raise ValueError(
            f"This process is {cluster.job} {cluster.index} of a cluster described by {cluster.source}, and {option} "
            f"would start another cluster in each of its tasks. Leave {option.partition(' ')[0]} out."
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
