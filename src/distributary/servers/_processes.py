"""Clusters whose workers and servers are separate processes."""

import concurrent.futures
import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from distributary._threads import call_after
from distributary.cluster_resolver import ClusterResolver, ClusterSpec, Peer, multi_worker
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError
from distributary.job import package_versions
from distributary.servers._certificates import (
    Credentials,
    credentials_of,
    credentials_of_this_process,
)
from distributary.servers._cluster import Cluster
from distributary.servers._grpc import GrpcLink
from distributary.servers._links import IDENTIFY, ConnectionLostError, Link, UnauthenticatedError
from distributary.servers._messages import Message
from distributary.servers._sessions import Task
from distributary.servers._sources import ScriptEndError, describe, is_reimporting

_log = logging.getLogger(__name__)

CONNECT_VARIABLE: Final = "DISTRIBUTARY_CONNECT_SECONDS"
_CONNECT_SECONDS = 120.0
_PATIENCE_SECONDS = 10.0  # before the chief says whom it waits for


def cluster_of(cluster_resolver: object) -> Cluster:
    """Returns the cluster for a strategy: a given cluster, or the processes a resolver names.

    Waits until all of these processes are there, for at most `DISTRIBUTARY_CONNECT_SECONDS` (120).

    Raises:
        InvalidTypeError: if it is neither a cluster nor a cluster resolver.
        InvalidValueError: if the cluster has no workers or no servers, or this process is not its
            chief.
        ClusterError: if tasks do not connect in time, do not know the same secret or have other
            versions of packages, or if the workers differ in their number of devices.
    """
    if isinstance(cluster_resolver, Cluster):
        return cluster_resolver
    if not isinstance(cluster_resolver, ClusterResolver):
        raise InvalidTypeError(
            f"ParameterServerStrategy: cluster_resolver is {cluster_resolver!r}, expected a"
            " ClusterResolver such as TFConfigClusterResolver(), or local_cluster(workers=2, ps=2)"
            " for workers and servers in this process."
        )
    if is_reimporting():
        raise ScriptEndError("only the chief creates the strategy")
    peers = tasks_of(cluster_resolver.cluster_spec())
    task_type = cluster_resolver.task_type
    if task_type not in (None, "chief"):
        raise InvalidValueError(
            f"ParameterServerStrategy: this process is {task_type} {cluster_resolver.task_id} of"
            " the cluster, and only the chief creates the strategy. Workers and servers call"
            " Server(cluster_resolver).join() instead."
        )
    return Cluster(*connect(peers, os.environ), describe)


def tasks_of(cluster_spec: ClusterSpec) -> list[Peer]:
    """Returns the workers and servers of a cluster.

    Raises:
        InvalidValueError: if there are no workers or no servers, if there are unknown types of
            tasks or several chiefs, or if the numbers of the servers have gaps.
    """
    for task_type in ("worker", "ps"):
        if task_type not in cluster_spec.jobs:
            raise InvalidValueError(
                f'The cluster has no "{task_type}": {cluster_spec.as_dict()}. Expected at least one'
                ' address each of "worker" and "ps". local_cluster(workers=2, ps=2) does without'
                " other processes."
            )
    if None in cluster_spec.job_tasks("ps"):
        raise InvalidValueError(
            f'The cluster has gaps between its "ps": {cluster_spec.as_dict()["ps"]}. Number the'
            " servers from 0."
        )
    first = cluster_spec.task_indices("worker")[0]
    peers = multi_worker(cluster_spec, "worker", first).peers
    return [peer for peer in peers if peer.task_type in ("worker", "ps")]


def connect_seconds(environ: Mapping[str, str]) -> float:
    """Returns how many seconds to wait for other tasks, from `DISTRIBUTARY_CONNECT_SECONDS`.

    Raises:
        InvalidValueError: if it is not a number.
    """
    text = environ.get(CONNECT_VARIABLE, str(_CONNECT_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise InvalidValueError(
            f"{CONNECT_VARIABLE} is {text!r}, expected a number of seconds."
        ) from None


def connect(
    peers: list[Peer], environ: Mapping[str, str]
) -> tuple[Sequence[Task], Sequence[Task], int]:
    """Waits for all tasks as their chief; checks names, package versions and numbers of devices.

    Args:
        peers: The workers and servers.
        environ: The environment.

    Returns:
        The workers, the servers, and the number of devices of every worker.

    Raises:
        ClusterError: see `cluster_of`.
    """
    credentials = credentials_of("chief", environ) or credentials_of_this_process("chief")
    tasks = {peer: grpc_task(peer, credentials) for peer in peers}
    replies: dict[Peer, dict[str, Any]] = {}

    def warn() -> None:
        missing = [str(peer) for peer in peers if peer not in replies]
        _log.warning("The chief waits for %s.", ", ".join(missing))

    _log.info("Waiting for %s", ", ".join(map(str, peers)))
    links = {peer: task.connect() for peer, task in tasks.items()}
    try:
        with call_after(_PATIENCE_SECONDS, warn):
            _identify(links, replies, connect_seconds(environ))
    finally:
        for link in links.values():
            link.close()
    workers, servers = (
        [task for peer, task in tasks.items() if peer.task_type == task_type]
        for task_type in ("worker", "ps")
    )
    return workers, servers, _num_devices(peers, replies)


def grpc_task(peer: Peer, credentials: Credentials | None) -> Task:
    """Returns a worker or server in another process, which a task with `credentials` can call."""
    return Task(str(peer), functools.partial(GrpcLink, peer.address, peer.name, credentials))


def _num_devices(peers: Sequence[Peer], replies: Mapping[Peer, dict[str, Any]]) -> int:
    counts = {p: replies[p].get("devices", 1) for p in peers if p.task_type == "worker"}
    (first, expected), *others = counts.items()
    for peer, count in others:
        if count != expected:
            raise ClusterError(
                f"{peer} has {count} devices, and {first} has {expected}: a step is one program for"
                " all workers. Start every worker with the same JAX_NUM_CPU_DEVICES, which"
                " `distributary launch --devices-per-worker` sets."
            )
    return int(expected)


def _identify(links: dict[Peer, Link], replies: dict[Peer, dict[str, Any]], seconds: float) -> None:
    """Asks every task who it is; repeats this until it is there, for at most so many seconds."""
    end = time.monotonic() + seconds
    reasons: dict[Peer, Exception] = {}
    calls = {link.start(Message(IDENTIFY)): peer for peer, link in links.items()}
    while calls:
        done, _ = concurrent.futures.wait(
            calls, max(0.0, end - time.monotonic()), concurrent.futures.FIRST_COMPLETED
        )
        if not done:
            listing = "".join(
                f"\n  {peer}: {reasons.get(peer, 'no answer')}"
                for peer in sorted(calls.values(), key=str)
            )
            raise ClusterError(
                f"ParameterServerStrategy: after {seconds:g} s, there is no connection to"
                f"{listing}\nStart a process with Server(cluster_resolver).join() at each address,"
                f" and let the chief connect to it; {CONNECT_VARIABLE} sets how many seconds the"
                " chief waits for them."
            )
        for call in done:
            peer = calls.pop(call)
            try:
                replies[peer] = call.result().fields
                _check(peer, replies[peer])
            except UnauthenticatedError as error:
                raise ClusterError(str(error)) from None
            except ConnectionLostError as error:
                reasons[peer] = error
                calls[links[peer].start(Message(IDENTIFY))] = peer


def _check(peer: Peer, fields: dict[str, Any]) -> None:
    if fields.get("task") != peer.name:
        raise ClusterError(
            f"{peer.address} should be {peer.name}, and is {fields.get('task')}. Give all"
            " tasks the same cluster, and each its own task."
        )
    versions, others = package_versions(), fields["versions"]
    different = [
        f"{package} {others[package]} and the chief {version}"
        for package, version in versions.items()
        if others.get(package, version) != version
    ]
    if different:
        raise ClusterError(
            f"{peer} has {', '.join(different)}. Install the same versions for all tasks."
        )
