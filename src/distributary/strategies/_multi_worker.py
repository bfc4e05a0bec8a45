"""Synchronous training on the devices of several machines."""

import logging
from typing import Any, final

from distributary.cluster_resolver import (
    ClusterResolver,
    TFConfigClusterResolver,
    multi_worker,
)
from distributary.context import get_replica_context
from distributary.devices import devices_of_all_hosts, replica_devices
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError
from distributary.job import connect
from distributary.launch import refuse_job
from distributary.options import CommunicationOptions
from distributary.strategies._base import Strategy
from distributary.strategies._job_devices import devices_of_all, extended_of_job

_log = logging.getLogger(__name__)


@final
class MultiWorkerMirroredStrategy(Strategy):
    """One replica per device of every worker of a cluster, with variables mirrored on all of them.

    Run the same program on every worker. Create the strategy before you compute anything with JAX:
    it waits until all workers have started, and connects them.

    Every worker has to do the same things with the strategy in the same order. If only one worker
    does something (printing, saving values that it has read), it must not call `run`, `reduce` or
    `gather` for it.

    When a worker is lost, the others end within two seconds, with a line on stderr that names it
    and the exit code `WorkerLostError.exit_code`. Their next step raises `WorkerLostError`; a
    process that does something else, or waits in a collective, is ended. The workers leave the
    program together: one that has finished waits for the others.

    Args:
        cluster_resolver: Knows where the workers are and which one this is; None reads `TF_CONFIG`.
            Without a cluster, this is a `MirroredStrategy` of this machine.
        communication_options: Options for combining gradients. `timeout_seconds` is also the time
            to wait for the other workers at the start (two minutes if it is None). A worker that is
            silent for `heartbeat_timeout_seconds` counts as lost.
        experimental_shard_optimizer_state: Whether every device of the cluster holds and updates
            only one part of the state of Keras optimizers; see `MirroredStrategy`. All workers then
            have to read this state together, and `communication_options` apply to everything except
            the gradients of optimizers.

    Raises:
        ClusterError: if a worker does not start in time, its port is taken, or the workers do not
            fit together.
        BackendStartedError: if JAX has already computed something.
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
            super().__init__(extended_of_job(self, None, compiled_for, options))
            return
        sharded = experimental_shard_optimizer_state
        spec = self._cluster_resolver.cluster_spec()
        if not spec:
            super().__init__(extended_of_job(self, None, replica_devices(None), options, sharded))
            return
        resolver = self._cluster_resolver
        place = multi_worker(spec, resolver.task_type, resolver.task_id)
        if "ps" in spec.jobs:
            reason = (
                f"MultiWorkerMirroredStrategy: the cluster has {spec.num_tasks('ps')} parameter"
                " server(s), which this strategy does not use: every worker keeps the"
                " variables itself. Start the job without them (`distributary launch` without"
                " --ps), or use ParameterServerStrategy."
            )
            refuse_job(reason)
            raise InvalidValueError(reason)
        if not place.in_collective_group:
            raise ClusterError(
                f"MultiWorkerMirroredStrategy: this process is {place.name}, which does not train"
                f" with the workers. Use MirroredStrategy or OneDeviceStrategy in the {place.name}."
            )
        connect(place, options or CommunicationOptions())
        super().__init__(extended_of_job(self, place, devices_of_all(place), options, sharded))
        if self._extended.options.hierarchical:  # its groups of devices need their own connections
            self.run(_all_reduce_one)
        _log.info("Using %r as %s", self, place.name)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Cluster resolver of this strategy."""
        return self._cluster_resolver


def _all_reduce_one() -> Any:
    context = get_replica_context()
    assert context is not None
    return context.all_reduce("SUM", 1.0)
