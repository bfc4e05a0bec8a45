"""The command line of `distributary`."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributary.cli._bench import add_bench_command
from distributary.cli._certs import add_certs_command
from distributary.cli._compile import add_compile_command, add_script_arguments, check_script
from distributary.cli._devices import add_devices_command
from distributary.cli._doctor import add_doctor_command
from distributary.errors import DistributaryError, InvalidValueError
from distributary.launch import TOKEN_VARIABLE, HostOptions, LaunchOptions, run

__all__ = ["launch_options", "main", "parser"]

_EPILOG = """\
examples:
  distributary launch --workers 4 train.py --epochs 3
  distributary launch --workers 4 --dashboard train.py
  distributary launch --workers 2 --devices-per-worker 4 -m my_package.train
  distributary launch --workers 2 --ps 1 train.py
  distributary launch --nnodes 2 --node-rank 0 --master 10.0.0.1:29500 train.py
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        arguments: Arguments after the name of the program; by default those of this process.
    """
    namespace = parser().parse_args(arguments)
    code: int = namespace.run(namespace)
    return code


def _launch(namespace: argparse.Namespace) -> int:
    try:
        options = _launch_options(namespace, os.environ)
    except DistributaryError as error:
        namespace.parser.error(str(error).removeprefix("launch: "))
    check_script(namespace)
    try:
        return run(options)
    except (DistributaryError, OSError) as error:
        print(f"distributary launch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before any worker has started
        return 130


def launch_options(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchOptions:
    """Returns the job that a command line describes, `["launch", "train.py"]` for example.

    Raises:
        DistributaryError: for impossible values.
        SystemExit: for arguments that do not exist.
    """
    return _launch_options(parser().parse_args(arguments), environ)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command `distributary`."""
    command = argparse.ArgumentParser(
        prog="distributary", description="Distributed training with JAX and Keras 3."
    )
    commands = command.add_subparsers(title="commands", metavar="COMMAND", required=True)
    launch = commands.add_parser(
        "launch",
        help="run a script as several workers",
        description="Runs a script as several workers, which find each other through TF_CONFIG,"
        " watches them, and leaves no process behind.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_launch_arguments(launch)
    launch.set_defaults(run=_launch, parser=launch)
    add_devices_command(commands)
    add_doctor_command(commands)
    add_bench_command(commands)
    add_certs_command(commands)
    add_compile_command(commands)
    return command


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=1, metavar="N", help="workers on this host (default: 1)")
    add(
        "--ps",
        type=int,
        default=0,
        metavar="M",
        help="parameter servers; with any, a chief runs, too (default: 0)",
    )
    add(
        "--devices-per-worker",
        type=int,
        metavar="K",
        help="CPU devices of each worker: sets JAX_NUM_CPU_DEVICES",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="M",
        help="how often to restart all workers after a failure, or with --ps the one that failed"
        " (default: 0)",
    )
    add(
        "--grace-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between TERM and KILL (default: 5)",
    )
    add("--log-dir", type=Path, metavar="DIR", help="write a log file per worker and attempt")
    add("--evaluator", action="store_true", help='also run the task "evaluator", on host 0')
    add(
        "--no-tuning",
        action="store_true",
        help="leave the workers' memory allocator and thread pool as they are",
    )
    add(
        "--dashboard",
        action="store_true",
        help="serve a page that shows the workers, and print its address; on host 0, the page shows"
        " the workers of all hosts",
    )
    add(
        "--dashboard-port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of the page (default: a free one)",
    )
    add(
        "--dashboard-address",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of this host at which to serve the page, without a password"
        " (default: 127.0.0.1)",
    )
    hosts = parser.add_argument_group("several hosts")
    hosts.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of hosts")
    hosts.add_argument("--node-rank", type=int, metavar="I", help="number of this host, from 0")
    hosts.add_argument("--master", metavar="HOST:PORT", help="address of host 0")
    hosts.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the secret of the job (default: the environment's {TOKEN_VARIABLE})",
    )
    hosts.add_argument(
        "--join-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds that all hosts have to join (default: 300)",
    )
    hosts.add_argument("--address", help="address at which the other hosts reach this one")
    add_script_arguments(parser, "Python script that every worker runs")


def _launch_options(namespace: argparse.Namespace, environ: Mapping[str, str]) -> LaunchOptions:
    python = [sys.executable, "-m"] if namespace.module else [sys.executable]
    return LaunchOptions(
        command=(*python, namespace.script, *namespace.arguments),
        num_workers=namespace.workers,
        num_servers=namespace.ps,
        devices_per_worker=namespace.devices_per_worker,
        max_restarts=namespace.max_restarts,
        grace_seconds=namespace.grace_seconds,
        log_dir=namespace.log_dir,
        evaluator=namespace.evaluator,
        tune=not namespace.no_tuning,
        dashboard_port=namespace.dashboard_port if namespace.dashboard else None,
        dashboard_address=namespace.dashboard_address,
        hosts=_host_options(namespace, environ),
    )


def _host_options(namespace: argparse.Namespace, environ: Mapping[str, str]) -> HostOptions | None:
    if namespace.nnodes == 1 and namespace.node_rank in (None, 0):
        return None
    if namespace.node_rank is None or namespace.master is None:
        missing = "--node-rank" if namespace.node_rank is None else "--master"
        raise InvalidValueError(
            f"launch: --nnodes is {namespace.nnodes}, but {missing} is missing. Every host runs the"
            " same command with its own --node-rank and the address of host 0 as --master."
        )
    if namespace.token_file is not None:
        try:
            token = namespace.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError) as error:
            raise InvalidValueError(f"launch: --token-file cannot be read: {error}") from error
    else:
        token = environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise InvalidValueError(
            "launch: several hosts need a secret, so that no stranger can join. Set"
            f" {TOKEN_VARIABLE} to the same value on all of them, or give --token-file. `openssl"
            " rand -hex 16` makes one."
        )
    return HostOptions(
        num_hosts=namespace.nnodes,
        host_rank=namespace.node_rank,
        master=namespace.master,
        token=token,
        join_seconds=namespace.join_seconds,
        address=namespace.address,
    )
