"""The commands that make jobs: `launch`, and `certs` for their certificates."""

import argparse
import os
import shlex
import sys
from argparse import BooleanOptionalAction as OnOff
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from distributary import launch
from distributary.cluster_resolver import TOKEN_VARIABLE
from distributary.errors import DistributaryError, InvalidValueError, LaunchError
from distributary.launch import HostOptions, LaunchOptions
from distributary.tools import monitoring
from distributary.tools.cli._arguments import (
    Parser,
    add_option,
    add_script_arguments,
    check_script,
    number,
    whole,
)

_LARGEST_PORT = 65535


def add_launch_arguments(parser: Parser) -> None:
    """Adds the arguments; those that are fields of `LaunchOptions` have the names of the fields."""

    def add(flag: str, field: str, type_: Callable[[str], Any], metavar: str, text: str) -> None:
        default = getattr(LaunchOptions, field)
        add_option(parser, flag, type_, metavar, text, default, dest=field)

    text = "workers on this host; with MIN:N, a job that cannot start with N goes on with fewer"
    default = str(LaunchOptions.num_workers)
    add_option(parser, "--workers", _range, "N", text, default, dest="num_workers")
    add("--ps", "num_servers", whole(0), "M", "parameter servers; with any, a chief runs, too")
    text = "CPU devices of each worker: sets JAX_NUM_CPU_DEVICES"
    add("--devices-per-worker", "devices_per_worker", whole(1), "K", text)
    text = "how often to restart all workers after a failure, or with --ps the one that failed"
    add("--max-restarts", "max_restarts", whole(0), "M", text)
    add("--grace-seconds", "grace_seconds", number(), "S", "seconds between TERM and KILL")
    add("--log-dir", "log_dir", Path, "DIR", "write a log file per worker and attempt")
    flag = parser.add_argument
    flag("--evaluator", action=OnOff, help='also run the task "evaluator", on host 0')
    text = "set the workers' memory allocator and thread pool; on unless you say --no-tuning"
    flag("--tuning", dest="tune", action=OnOff, help=text)
    text = "serve a page that shows the workers, and print its address; on host 0, the page shows"
    flag("--dashboard", action=OnOff, help=f"{text} the workers of all hosts")
    text = "serve the page at this port (default: a free one)"
    add_option(parser, "--dashboard-port", whole(0, _LARGEST_PORT), "PORT", text)
    text = "serve the page at this address of this host, without a password (default: 127.0.0.1)"
    add_option(parser, "--dashboard-address", str, "ADDRESS", text)
    hosts = parser.add_argument_group("several hosts")
    text = "number of hosts; with MIN:N, the job starts again without hosts that are lost, and with"
    add_option(hosts, "--nnodes", _range, "N", f"{text} those that come, as long as it has MIN")
    add_option(hosts, "--node-rank", whole(0), "I", "number of this host, from 0")
    hosts.add_argument("--master", metavar="HOST:PORT", help="address of host 0")
    text = f"file with the secret of the job (default: the environment's {TOKEN_VARIABLE})"
    add_option(hosts, "--token-file", Path, "FILE", text)
    text = f"seconds that all hosts have to join (default: {HostOptions.join_seconds:g})"
    add_option(hosts, "--join-seconds", number(), "S", text)
    hosts.add_argument("--address", help="address at which the other hosts reach this one")
    add_script_arguments(parser, "Python script that every worker runs")


def run_launch(namespace: argparse.Namespace) -> int:
    """Runs a script as several workers.

    The workers find each other through TF_CONFIG. The launcher watches them, and leaves no process
    behind.

    Examples:
      distributary launch --workers 4 train.py --epochs 3
      distributary launch --workers 4 --dashboard train.py
      distributary launch --workers 2 --devices-per-worker 4 -m my_package.train
      distributary launch --workers 2 --ps 1 train.py
      distributary launch --nnodes 2 --node-rank 0 --master 10.0.0.1:29500 train.py
    """
    check_script(namespace)
    try:
        options = options_of(namespace, os.environ)
    except DistributaryError as error:
        namespace.parser.error(str(error).removeprefix("launch: "))
    misplaced = set(namespace.arguments) & {"--workers", "--nnodes", "--ps"}
    if misplaced and (options.num_workers, options.num_servers, options.hosts) == (1, 0, None):
        name = min(misplaced)
        print(
            f"[launcher] {name} comes after {namespace.script}, so the script gets it, and one"
            f" worker starts. For more, write it before: distributary launch {name} N"
            f" {namespace.script}",
            file=sys.stderr,
        )
    try:
        has_page = options.dashboard_port is not None
        return launch.run(options, serve=monitoring.serve if has_page else None)
    except OSError as error:
        raise LaunchError(str(error)) from error
    except KeyboardInterrupt:  # before any worker has started
        return 130


def options_of(namespace: argparse.Namespace, environ: Mapping[str, str]) -> LaunchOptions:
    """Returns the job that the parsed arguments describe.

    Raises:
        DistributaryError: for impossible values.
    """
    names = {field.name for field in fields(LaunchOptions)}
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    options = {name: value for name, value in given.items() if name in names}
    options["min_workers"], options["num_workers"] = options["num_workers"]
    if namespace.dashboard is False:
        options.pop("dashboard_port", None)
    elif namespace.dashboard or namespace.dashboard_address is not None:
        options.setdefault("dashboard_port", 0)
    python = [sys.executable, "-m"] if namespace.module else [sys.executable]
    options["command"] = (*python, namespace.script, *namespace.arguments)
    return LaunchOptions(**options, hosts=_host_options(namespace, environ))


def _host_options(namespace: argparse.Namespace, environ: Mapping[str, str]) -> HostOptions | None:
    min_hosts, num_hosts = namespace.nnodes or (None, 1)
    all_names = ("node_rank", "master", "token_file", "join_seconds", "address")
    names = [name for name in all_names if getattr(namespace, name) not in (None, 0)]
    if namespace.nnodes is None and names:
        raise InvalidValueError(
            f"launch: --{names[0].replace('_', '-')} is for a job on several hosts, but --nnodes,"
            " the number of hosts, is missing."
        )
    if num_hosts == 1 and namespace.node_rank in (None, 0):
        return None
    if namespace.node_rank is None or namespace.master is None:
        missing = "--node-rank" if namespace.node_rank is None else "--master"
        raise InvalidValueError(
            f"launch: --nnodes is {num_hosts}, but {missing} is missing. Every host runs the"
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
    seconds = namespace.join_seconds
    seconds = HostOptions.join_seconds if seconds is None else seconds
    rank, master, address = namespace.node_rank, namespace.master, namespace.address
    return HostOptions(num_hosts, rank, master, token, seconds, address, min_hosts)


def _range(text: str) -> tuple[int | None, int]:
    """Returns the least and the largest number of `N` or `MIN:N`."""
    least, _, most = text.rpartition(":")
    return whole(1)(least) if least else None, whole(1)(most)


def add_certs_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_option(parser, "--out", Path, "DIR", "folder for the files", required=True)
    add_option(parser, "--days", whole(1), "N", "days until they expire", 365)
    text = "host names and IP addresses to put into the certificates; the tasks do not need them"
    add_option(parser, "--hosts", str, "HOST", text, nargs="+")


def run_certs(namespace: argparse.Namespace) -> int:
    """Makes certificates for the tasks of a job with parameter servers.

    Makes a certificate authority for one job, and a certificate for each of the roles chief, worker
    and ps. The tasks use them to encrypt their connections and to prove who they are. Set
    DISTRIBUTARY_CERTS=DIR for all tasks.
    """
    from distributary.servers._grpc import make_certificates

    try:
        files = make_certificates(namespace.out, namespace.hosts or [], namespace.days)
    except OSError as error:
        raise InvalidValueError(f"--out {namespace.out} cannot be written: {error}") from error
    print(*files, sep="\n")
    folder = namespace.out.absolute()
    print(
        f"\nValid for {namespace.days} days. Next:\n"
        f"  export DISTRIBUTARY_CERTS={shlex.quote(str(folder))}  # for every task of the job\n"
        "Start the tasks on this machine with `distributary launch --ps`. To another machine, copy"
        " ca.pem\nand the .pem and .key of its own role, with scp for example.",
        file=sys.stderr,
    )
    return 0
