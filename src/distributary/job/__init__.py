"""Conversations between the processes of a job: the channel, the meeting, consensus, liveness.

Every conversation is a `Channel`. `connect` lets the workers meet, starts `Liveness` and then the
`Consensus`, with which everything above this package agrees on something on the host.
"""

from distributary.job._channel import (
    Channel,
    ChannelClosedError,
    ConnectionAcceptor,
    Message,
    bound_address,
    connected,
    listening,
)
from distributary.job._connection import connect
from distributary.job._consensus import Consensus, consensus
from distributary.job._copies import copies
from distributary.job._proofs import is_proof, new_challenge, proof
from distributary.job._rendezvous import package_versions
