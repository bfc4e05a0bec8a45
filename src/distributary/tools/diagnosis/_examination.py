"""All checks, in a useful order."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import final

import jax

from distributary.cluster_resolver import MultiWorker, Peer, TFConfigClusterResolver, place_of
from distributary.devices import (
    prepare_local_devices,
    requested_cpu_devices,
    set_logical_cpu_devices,
)
from distributary.errors import ClusterError, DistributaryError
from distributary.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    Strategy,
    accept_any_strategy,
)
from distributary.tools.diagnosis import _machine as machine
from distributary.tools.diagnosis._all_reduce import all_reduce
from distributary.tools.diagnosis._links import Link, Meeting, link_checks
from distributary.tools.diagnosis._machine import Check, Json
from distributary.tools.diagnosis._training import training

_ALONE = "this process"  # name of a task without a cluster


@final
@dataclass(frozen=True)
class Report:
    """The findings.

    Args:
        checks: The results of each task that took part, by its name.
        tasks: Names of the tasks; links refer to their positions. A single one without a cluster.
        links: The links between tasks.
    """

    checks: dict[str, list[Check]]
    tasks: tuple[str, ...]
    links: tuple[Link, ...]

    @property
    def has_problem(self) -> bool:
        """True if there is a problem with which training would fail."""
        return any(c.status == "problem" for checks in self.checks.values() for c in checks)

    def to_json(self) -> Json:
        """Returns the report as dicts, lists, numbers and strings."""
        return {
            "problem": self.has_problem,
            "tasks": list(self.tasks),
            "checks": {task: [asdict(c) for c in checks] for task, checks in self.checks.items()},
            "links": [asdict(link) for link in self.links],
        }


def examine(parts: Sequence[str], wait_seconds: float, use: Callable[[Report], None]) -> Report:
    """Examines this machine and, if TF_CONFIG names a cluster, its tasks and their links.

    All tasks of the cluster must call it.

    Args:
        parts: Some of `"machine"`, `"links"`, `"all-reduce"` and `"training"`.
        wait_seconds: Seconds for which tasks wait for each other.
        use: Called with the report. The first task gets the report of all tasks; another task gets
            its own, and only if it cannot reach the first one. The other tasks stay until `use`
            has returned at the first one.

    Returns:
        The report of this task.
    """
    accept_any_strategy()
    try:
        place = place_of(TFConfigClusterResolver())
    except DistributaryError as error:
        fix = "Correct TF_CONFIG as the message says, or unset it"
        failed = Check("cluster", "problem", str(error), fix)
        report = Report({_ALONE: [failed]}, (_ALONE,), ())
        use(report)
        return report
    # An evaluator is a job of its own, so it does not meet the others.
    all_peers = () if place is None else place.peers
    peers = tuple(peer for peer in all_peers if peer.task_type != "evaluator")
    if place is None or len(peers) < 2 or place.address is None or {*parts} == {"machine"}:
        report = _alone(parts, place)
        use(report)
        return report
    return _together(parts, wait_seconds, use, place, peers)


def _alone(parts: Sequence[str], place: MultiWorker | None) -> Report:
    name = _ALONE if place is None else place.name
    checks = [*_before_jax(parts, place)]
    if "links" in parts:
        checks.append(Check("links", "skipped", "there is only one process"))
    num_devices = requested_cpu_devices()
    if num_devices == 1 and not {"all-reduce", "training"}.isdisjoint(parts):
        set_logical_cpu_devices(2)  # so that there is something to reduce
    checks += _with_jax(parts, MirroredStrategy, num_devices, None)
    return Report({name: checks}, (name,), ())


def _together(
    parts: Sequence[str],
    wait_seconds: float,
    use: Callable[[Report], None],
    place: MultiWorker,
    peers: tuple[Peer, ...],
) -> Report:
    tasks = tuple(peer.name for peer in peers)
    number = tasks.index(place.name)
    checks = [*_before_jax(parts, place)]

    def failed(error: ClusterError, fix: str) -> Report:
        checks.append(Check("links", "problem", str(error), fix))
        report = Report({place.name: checks}, tasks, ())
        use(report)
        return report

    reduces = peers == place.workers  # with parameter servers, workers do not reduce
    try:
        meeting = Meeting(peers, number, wait_seconds, any_port=reduces)
    except ClusterError as error:
        fix = "End the other program, which `ss -ltnp` shows, or choose another port"
        return failed(error, fix)
    with contextlib.closing(meeting):
        try:
            links = meeting.measure()
        except ClusterError as error:
            fix = f"Check that {tasks[0]} runs and that no firewall blocks its port"
            report = failed(error, f"{fix}, and look at its output")
            time.sleep(wait_seconds)  # so that others learn whether they reach this task
            return report
        results = [*link_checks(links, peers, wait_seconds)]
        checks += results if number == 0 else ()
        checks += _after_links(parts, links, results, reduces)
        of_tasks = {place.name: checks}
        reports = meeting.reports([asdict(check) for check in checks])
        if reports is not None:
            for n in sorted({link.source for link in links} - {0}):
                of_tasks[tasks[n]] = _checks_of(reports[n])
        report = Report(of_tasks, tasks, tuple(links))
        if reports is not None:
            use(report)
        return report


def _after_links(
    parts: Sequence[str], links: Sequence[Link], results: Sequence[Check], reduces: bool
) -> Iterator[Check]:
    """Runs the checks of a cluster's task that need JAX."""
    num_devices = requested_cpu_devices()
    if reduces and all(check.status != "problem" for check in results):
        slowest = min(x.bytes_per_second for x in links if x.source != x.target)
        yield from _with_jax(parts, MultiWorkerMirroredStrategy, num_devices, slowest)
        return
    if "all-reduce" in parts:
        why = "workers of a job with parameter servers do not all-reduce"
        if reduces:
            why = "the workers do not reach each other"
        yield Check("all-reduce", "skipped", why)
    if "machine" in parts:
        yield from _with_jax(["machine"], MirroredStrategy, num_devices, None)


def _checks_of(report: Json) -> list[Check]:
    if report is None:
        detail = "it ended before its checks were done"
        return [Check("links", "problem", detail, "Look at its output")]
    return [Check(**check) for check in report]


def _before_jax(parts: Sequence[str], place: MultiWorker | None) -> Iterator[Check]:
    if "machine" in parts:
        yield machine.versions()
        yield machine.keras(os.environ)
        yield machine.cluster(place)
        yield machine.ports(place)
        yield machine.host_name(place)
        yield machine.memory()


def _with_jax(
    parts: Sequence[str],
    strategy_type: Callable[[], Strategy],
    num_devices: int,
    network_bytes_per_second: float | None,
) -> Iterator[Check]:
    if {*parts} == {"links"}:
        return
    try:
        prepare_local_devices()
        strategy = strategy_type()
    except (DistributaryError, RuntimeError) as error:
        fix = "Do what the message says, or set JAX_PLATFORMS=cpu to use only CPU devices"
        yield Check("devices", "problem", f"{type(error).__name__}: {error}", fix)
        return
    if "machine" in parts:
        yield machine.devices(num_devices)
        yield machine.thread_pool()
        yield machine.allocator(os.environ)
    part = "all-reduce"
    try:
        if part in parts:
            yield all_reduce(strategy.extended.mesh, network_bytes_per_second)
        part = "training"
        if part in parts:
            yield training(strategy)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # gloo raises ValueError
        fix = "Look at the output of the other workers; on GPUs set NCCL_DEBUG=INFO"
        yield Check(part, "problem", f"{type(error).__name__}: {error}", fix)
