"""Refuses a job of several processes whose program does not bring them together.

Every task of such a job would train alone, or with all of the others but the servers, and the
results would look right.
"""

import sys
from pathlib import Path

import jax

from distributary.launch import refuse_job, size_of_job

_is_checked = False


def accept_any_strategy() -> None:
    """Leaves this process unchecked, because it examines devices and trains nothing."""
    global _is_checked
    _is_checked = True


def check_job(name: str, *, needs_servers: bool = False) -> None:
    """Checks that the first strategy of this process, or the first `fit`, is one for its job.

    If there are parameter servers, it has to be for them; several workers have to be connected,
    whether by this strategy or by the script.

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
    num_workers, num_servers = size_of_job()
    program = Path(sys.argv[0]).name or "the program"
    if num_servers and not needs_servers:
        reason = (
            f"{name}: the cluster has {num_servers} parameter server(s), to which this strategy"
            f" gives nothing to do: every task of {program} would train alone. Start the job"
            " without them (`distributary launch` without --ps), or use ParameterServerStrategy."
        )
    elif num_workers > 1 and not num_servers and not jax.distributed.is_initialized():
        reason = (
            f"{name}: the cluster has {num_workers} workers, and nothing connects them: each would"
            f" train a model of its own in {program}, and all would write the same files. Use"
            " MultiWorkerMirroredStrategy, or start one worker (`distributary launch --workers 1`)."
            ' If each is to do work of its own, begin with os.environ.pop("TF_CONFIG").'
        )
    else:
        return
    refuse_job(reason)
