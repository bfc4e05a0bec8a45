"""The command `distributary certs`: certificates for jobs with parameter servers."""

import argparse
import sys
from pathlib import Path
from typing import Any

from distributary.errors import DistributaryError

__all__ = ["add_certs_command"]


def add_certs_command(commands: Any) -> None:
    """Adds the command to the subparsers of `distributary`."""
    parser = commands.add_parser(
        "certs",
        help="make certificates for the tasks of a job with parameter servers",
        description="Makes a certificate authority for one job, and a certificate for each of the"
        " roles chief, worker and ps. The tasks use them to encrypt their connections and to prove"
        " who they are. Set DISTRIBUTARY_CERTS=DIR for all tasks.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    add("--days", type=int, default=365, metavar="N", help="days until they expire (default: 365)")
    add(
        "--hosts",
        nargs="+",
        default=[],
        metavar="HOST",
        help="host names and IP addresses to put into the certificates; the tasks do not need them",
    )
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    from distributary.coordinator._certificates import make_certificates

    try:
        files = make_certificates(namespace.out, namespace.hosts, namespace.days)
    except (DistributaryError, OSError) as error:
        print(f"distributary certs: {str(error).removeprefix('certs: ')}", file=sys.stderr)
        return 1
    print(*files, sep="\n")
    return 0
