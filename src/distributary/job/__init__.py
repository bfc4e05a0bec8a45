"""Conversations between the processes of a job: the channel, the meeting, consensus, liveness.

Every conversation is a `Channel`. `connect` lets the workers meet, starts `Liveness` and then the
`Consensus`, with which everything above this package agrees on something on the host.
"""

import contextlib
import importlib.metadata
from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.job._channel import (
    Channel,
    ChannelClosedError,
    ConnectionAcceptor,
    Message,
    bound_address,
    connected,
    is_proof,
    listening,
    new_challenge,
    proof,
)

if TYPE_CHECKING:
    from distributary.job._agreed_steps import AgreedSteps, Coworkers, Ready, signature, spec_of
    from distributary.job._connection import connect
    from distributary.job._consensus import (
        Consensus,
        Turn,
        check_same_data,
        consensus,
        copies,
        fingerprint,
        in_turn,
    )
    from distributary.job._programs import compiled_once, share_compilation
else:  # imported on first use: the launcher talks on channels without JAX
    __getattr__ = late_names(
        __name__,
        {
            "_programs": "compiled_once share_compilation",
            "_connection": "connect",
            "_consensus": "Consensus Turn check_same_data consensus copies fingerprint in_turn",
            "_agreed_steps": "AgreedSteps Coworkers Ready signature spec_of",
        },
    )

_PACKAGES = ("distributary", "jax", "jaxlib", "keras", "keras-nightly")


def package_versions() -> dict[str, str]:
    """Returns the versions of packages that all tasks of a job must have in common."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
