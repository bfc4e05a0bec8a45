"""Makes certificates for the tasks of a job with parameter servers.

Makes a certificate authority for one job, and a certificate for each of the roles chief, worker and
ps. The tasks use them to encrypt their connections and to prove who they are. Set
DISTRIBUTARY_CERTS=DIR for all tasks.
"""

import argparse
import shlex
import sys
from pathlib import Path

from distributary.errors import InvalidValueError
from distributary.tools.cli._arguments import add_option, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    add_option(parser, "--days", whole(1), "N", "days until they expire", 365)
    add(
        "--hosts",
        nargs="+",
        default=[],
        metavar="HOST",
        help="host names and IP addresses to put into the certificates; the tasks do not need them",
    )


def run(namespace: argparse.Namespace) -> int:
    """Writes the files, and prints their names."""
    from distributary.servers._certificates import make_certificates

    try:
        files = make_certificates(namespace.out, namespace.hosts, namespace.days)
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
