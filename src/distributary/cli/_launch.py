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

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from distributary.cli._arguments import add_option, add_script_arguments, check_script
from distributary.cluster_resolver import TOKEN_VARIABLE
from distributary.errors import DistributaryError, InvalidValueError, LaunchError
from distributary.launch import HostOptions, LaunchOptions, run as run_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments; those that are fields of `LaunchOptions` have the names of the fields."""

    def add(flag: str, field: str, type_: Callable[[str], Any], metavar: str, text: str) -> None:
        default = getattr(LaunchOptions, field)
        add_option(parser, flag, type_, metavar, text, default, field)

    add("--workers", "num_workers", int, "N", "workers on this host")
    add("--ps", "num_servers", int, "M", "parameter servers; with any, a chief runs, too")
    text = "CPU devices of each worker: sets JAX_NUM_CPU_DEVICES"
    add("--devices-per-worker", "devices_per_worker", int, "K", text)
    text = "how often to restart all workers after a failure, or with --ps the one that failed"
    add("--max-restarts", "max_restarts", int, "M", text)
    add("--grace-seconds", "grace_seconds", float, "S", "seconds between TERM and KILL")
    add("--log-dir", "log_dir", Path, "DIR", "write a log file per worker and attempt")
    flag = parser.add_argument
    flag("--evaluator", action="store_true", help='also run the task "evaluator", on host 0')
    flag(
        "--no-tuning",
        dest="tune",
        action="store_false",
        help="leave the workers' memory allocator and thread pool as they are",
    )
    flag(
        "--dashboard",
        action="store_true",
        help="serve a page that shows the workers, and print its address; on host 0, the page shows"
        " the workers of all hosts",
    )
    text = "port of the page; 0 takes a free one"
    add_option(parser, "--dashboard-port", int, "PORT", text, 0)
    text = "address of this host at which to serve the page of --dashboard, without a password"
    add("--dashboard-address", "dashboard_address", str, "ADDRESS", text)
    hosts = parser.add_argument_group("several hosts")
    hosts.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of hosts")
    hosts.add_argument("--node-rank", type=int, metavar="I", help="number of this host, from 0")
    hosts.add_argument("--master", metavar="HOST:PORT", help="address of host 0")
    text = f"file with the secret of the job (default: the environment's {TOKEN_VARIABLE})"
    add_option(hosts, "--token-file", Path, "FILE", text)
    text = "seconds that all hosts have to join"
    add_option(hosts, "--join-seconds", float, "S", text, HostOptions.join_seconds)
    hosts.add_argument("--address", help="address at which the other hosts reach this one")
    add_script_arguments(parser, "Python script that every worker runs")


def run(namespace: argparse.Namespace) -> int:
    """Runs the job on this host."""
    try:
        options = options_of(namespace, os.environ)
    except DistributaryError as error:
        namespace.parser.error(str(error).removeprefix("launch: "))
    check_script(namespace)
    try:
        return run_job(options)
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
    options = {name: value for name, value in vars(namespace).items() if name in names}
    if not namespace.dashboard:
        options["dashboard_port"] = None
    python = [sys.executable, "-m"] if namespace.module else [sys.executable]
    options["command"] = (*python, namespace.script, *namespace.arguments)
    return LaunchOptions(**options, hosts=_host_options(namespace, environ))


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
