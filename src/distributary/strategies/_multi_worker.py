"""Synchronous training on the devices of several machines."""

import logging
from typing import Any, final

from distributary.cluster_resolver import (
    ClusterResolver,
    TFConfigClusterResolver,
    multi_worker,
)
from distributary.context import get_replica_context
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError
from distributary.job import connect
from distributary.options import CommunicationOptions
from distributary.strategies._base import Strategy
from distributary.strategies._extended import StrategyExtended
from distributary.strategies._job_devices import devices_of_all, extended_of_job
from distributary.topology import devices_of_all_hosts, replica_devices

_log = logging.getLogger(__name__)


@final
class MultiWorkerMirroredStrategy(Strategy):
    """One replica per device of every worker of a cluster, with variables mirrored on all of them.

    The same program runs on every worker. Create the strategy before anything is computed with
    JAX: it waits until all workers are there and connects them.

    Every worker has to do the same things with the strategy in the same order; what only one of
    them does (printing, saving what it has read) must not involve `run`, `reduce` or `gather`.

    When a worker is lost, the others end within two seconds, with a line on stderr that names it
    and the exit code `WorkerLostError.exit_code`: their next step raises `WorkerLostError`, and a
    process that does something else, or waits in a collective, is ended. The workers leave the
    program together: one that has finished waits for the others.

    Args:
        cluster_resolver: Says where the workers are and which one this is; None reads `TF_CONFIG`.
            Without a cluster this is a `MirroredStrategy` of this machine.
        communication_options: How gradients are combined; its `timeout_seconds` is also how long
            the start waits for the other workers, two minutes if it is None, and its
            `heartbeat_timeout_seconds` when a silent worker counts as lost.
        experimental_shard_optimizer_state: Whether every device of the cluster holds and updates
            one part of the state of Keras optimizers; see `MirroredStrategy`. To read it, then, is
            something that all workers have to do together. `communication_options` say how
            everything but the gradients of optimizers is combined.

    Raises:
        ClusterError: if a worker does not come in time, its port is taken, or the workers do not
            fit together.
        BackendStartedError: if JAX has computed something already.
        InvalidTypeError: for arguments of another type.
        InvalidValueError: if the cluster or the task is wrong, or if the cluster has parameter
            servers.

    Source: `tf.distribute.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        experimental_shard_optimizer_state: bool = False,
    ) -> None:
        options = communication_options
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise InvalidTypeError(
                f"MultiWorkerMirroredStrategy: cluster_resolver is {cluster_resolver!r}, expected a"
                " ClusterResolver such as distributary.cluster_resolver.TFConfigClusterResolver()."
            )
        if options is not None and not isinstance(options, CommunicationOptions):
            raise InvalidTypeError(
                f"MultiWorkerMirroredStrategy: communication_options is {options!r}, expected"
                " distributary.experimental.CommunicationOptions."
            )
        self._cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        compiled_for = devices_of_all_hosts()
        if compiled_for is not None:
            super().__init__(StrategyExtended(self, compiled_for, options=options))
            return
        spec = self._cluster_resolver.cluster_spec()
        if not spec:
            super().__init__(
                StrategyExtended(
                    self,
                    replica_devices(None),
                    options=options,
                    shard_optimizer_state=experimental_shard_optimizer_state,
                )
            )
            return
        resolver = self._cluster_resolver
        place = multi_worker(spec, resolver.task_type, resolver.task_id)
        if "ps" in spec.jobs:
            raise InvalidValueError(
                f"MultiWorkerMirroredStrategy: the cluster has {spec.num_tasks('ps')} parameter"
                " server(s), to which this strategy gives nothing to do: every worker keeps the"
                " variables itself. Start the job without them (`distributary launch` without"
                " --ps), or use ParameterServerStrategy."
            )
        if not place.in_collective_group:
            raise ClusterError(
                f"MultiWorkerMirroredStrategy: this process is {place.name}, which does not train"
                f" with the workers. Use MirroredStrategy or OneDeviceStrategy in the {place.name}."
            )
        connect(place, options or CommunicationOptions())
        super().__init__(
            extended_of_job(
                self, place, devices_of_all(place), options, experimental_shard_optimizer_state
            )
        )
        if self._extended.options.hierarchical:  # between other groups of devices
            self.run(_all_reduce_one)
        _log.info("Using %r as %s", self, place.name)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The cluster resolver."""
        return self._cluster_resolver


def _all_reduce_one() -> Any:
    context = get_replica_context()
    assert context is not None
    return context.all_reduce("SUM", 1.0)
