"""Refuses a job with parameter servers whose program does not use them.

Every task of such a job would train alone, or with all of the others but the servers, and the
results would look right.
"""

import sys
from pathlib import Path

from distributary.errors import InvalidValueError
from distributary.launch import num_servers_of_job, refuse_job

_is_checked = False


def accept_any_strategy() -> None:
    """Leaves this process unchecked, because it examines devices and trains nothing."""
    global _is_checked
    _is_checked = True


def check_job(name: str, *, needs_servers: bool) -> None:
    """Checks that the first strategy of this process is one for parameter servers if there are any.

    Args:
        name: Name of the strategy.
        needs_servers: Whether it is one for parameter servers.

    Raises:
        InvalidValueError: if it is not, unless a launcher has started this process; then the
            process ends.
    """
    global _is_checked
    if _is_checked:
        return
    _is_checked = True
    num_servers = num_servers_of_job()
    if not num_servers or needs_servers:
        return
    program = Path(sys.argv[0]).name or "the program"
    reason = (
        f"{name}: the cluster has {num_servers} parameter server(s), to which this strategy gives"
        f" nothing to do: every task of {program} would train alone. Start the job without them"
        " (`distributary launch` without --ps), or use ParameterServerStrategy."
    )
    refuse_job(reason)
    raise InvalidValueError(reason)
