"""Trainings on Ray: synchronous ones have a worker per actor, others a cluster of actors."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from distributary.errors import ClusterError, InvalidValueError, WorkerLostError
from distributary.launch import RESTART_VARIABLE
from distributary.servers._partitioners import check_positive
from distributary.servers._processes import connect_seconds
from distributary.servers._ray import RayTask, import_ray, not_started, ray_cluster

# How long a training waits for all of its workers if it may begin with fewer.
_PATIENCE_SECONDS = 10.0
# Time for the error of a lost worker to arrive, after that of a worker that has missed it.
_LOST_WORKER_SECONDS = 1.0
_GROWS: Final = object()


def ray(
    train: Callable[..., Any],
    *args: Any,
    workers: int | tuple[int, int] = 2,
    ps: int = 0,
    max_restarts: int = 0,
    worker_options: Mapping[str, Any] | None = None,
    ps_options: Mapping[str, Any] | None = None,
    insecure: bool = False,
) -> Any:
    """Runs a training on Ray, and returns what it returns.

    Without parameter servers, every worker is an actor that calls `train(*args)`, where
    `MultiWorkerMirroredStrategy()` finds the others. Workers on the same machine follow each other
    in rank. If one is lost or raises an error, all of them end and start again in new processes,
    and your callbacks or checkpoints restore what they have saved.

    With parameter servers, this process calls `train(cluster, *args)` with a `ray_cluster`, for
    `ParameterServerStrategy(cluster)`, and Ray starts lost tasks again.

    It calls `ray.init()` unless your program has already connected to Ray.

    Args:
        train: The training. Ray sends it to the workers, with the functions and values that it
            uses; they import packages and modules.
        *args: Its arguments.
        workers: Number of workers. A pair is the least and the most: the training starts with as
            many as Ray has places for, goes on without a worker whose machine is lost, and starts
            again with more when there is a place. The global batch stays as it is.
        ps: Number of parameter servers.
        max_restarts: Number of times that all workers start again after a failure.
        worker_options: Options of Ray's `ActorClass.options` for the workers, such as
            `{"num_gpus": 1}`. By default, `num_cpus` is 1.
        ps_options: The same for the servers, but with a default `num_cpus` of 0.
        insecure: Allows parameter servers on several machines without certificates.

    Returns:
        A list of what `train` returns in each worker, in the order of their ranks; with parameter
        servers, what it returns in this process.

    Raises:
        InvalidTypeError: if a number is not an int.
        InvalidValueError: if a number is not positive, or a pair is not in order.
        ClusterError: if workers cannot be started, or are not there after
            `DISTRIBUTARY_CONNECT_SECONDS` (120).
        MissingPackageError: if ray is not installed.
        RayError: if a worker fails and no restart is left; the error is also an instance of what
            `train` has raised.
    """
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    check_positive("ray", workers=least)
    check_positive("ray", workers=most)
    if least > most or (ps and least < most):
        raise InvalidValueError(
            f"ray: workers is {workers!r} and ps is {ps}, expected (least, most) in this order, or,"
            " with servers, a number."
        )
    if ps:
        options = {"worker_options": worker_options, "ps_options": ps_options}
        with ray_cluster(most, ps, **options, insecure=insecure) as cluster:
            return train(cluster, *args)
    library = import_ray()
    if not library.is_initialized():
        library.init()
    maker = library.remote(RayTask).options(
        **{"num_cpus": 1, "scheduling_strategy": "SPREAD", **(worker_options or {})}
    )
    num_starts = num_restarts = 0
    while True:
        actors = [maker.remote("worker", i) for i in range(most)]
        try:
            outcome = _attempt(library, actors, least, num_starts, train, args)
        finally:
            for actor in actors:
                library.kill(actor)
        if isinstance(outcome, list):
            return outcome
        if outcome is not _GROWS:
            if num_restarts == max_restarts:
                raise outcome
            num_restarts += 1
        num_starts += 1


def _attempt(
    library: ModuleType,
    actors: Sequence[Any],
    least: int,
    number: int,
    train: Callable[..., Any],
    args: Sequence[Any],
) -> Any:
    """Runs a training until it ends or must start again.

    Returns:
        What the workers return; the error of one that has failed; `_GROWS` if there is a place for
        one more.
    """
    calls = {actor.address.remote(None): actor for actor in actors}
    seconds = connect_seconds(os.environ)
    patience = seconds if least == len(actors) else min(seconds, _PATIENCE_SECONDS)
    placed, late = library.wait([*calls], num_returns=len(actors), timeout=patience)
    if len(placed) < least:
        placed, late = library.wait([*calls], num_returns=least, timeout=seconds - patience)
    if len(placed) < least:
        names = [f"worker {i}" for i, call in enumerate(calls) if call in late]
        raise not_started("ray", library, seconds, names)
    try:
        # Those of one machine follow each other, as the shards of a host's devices do.
        order = sorted((library.get(call), i) for i, call in enumerate(calls) if call in placed)
    except library.exceptions.RayError as error:
        raise ClusterError(f"ray: a worker could not be started: {error}") from error
    addresses = [address for address, _ in order]
    runs = []
    for rank, (_, i) in enumerate(order):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environ = {"TF_CONFIG": json.dumps(task), RESTART_VARIABLE: str(number)}
        runs.append(actors[i].call.remote(environ, train, args))
    going_on = list(runs)
    while going_on:
        grows = late if len(going_on) == len(runs) else []  # not at the end
        (first, *_), _ = library.wait([*going_on, *grows], num_returns=1)
        if first in late:
            return _GROWS
        try:
            library.get(first)
        except library.exceptions.RayError as error:
            return _cause(library, error, [run for run in going_on if run != first])
        going_on.remove(first)
    return library.get(runs)


def _cause(library: ModuleType, error: Exception, others: Sequence[Any]) -> Exception:
    """Returns the error of the worker that was lost, if another one has missed it first."""
    if not isinstance(error, WorkerLostError) or not others:
        return error
    ended, _ = library.wait([*others], num_returns=len(others), timeout=_LOST_WORKER_SECONDS)
    for run in ended:
        try:
            library.get(run)
        except library.exceptions.RayError as other:
            if not isinstance(other, WorkerLostError):
                return other
    return error
