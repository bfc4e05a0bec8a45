"""All checks, in a useful order, with those that need a strategy."""

import contextlib
import math
import os
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.cluster_resolver import MultiWorker, Peer, TFConfigClusterResolver, place_of
from distributary.context import ReplicaContext, get_replica_context
from distributary.data import Dataset
from distributary.devices import (
    REPLICA_AXIS,
    local_devices_of,
    local_replicas,
    prepare_local_devices,
    put_stacked,
    requested_cpu_devices,
    set_logical_cpu_devices,
)
from distributary.engine import format_bytes
from distributary.errors import ClusterError, DistributaryError
from distributary.gradients import value_and_grad
from distributary.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    accept_any_strategy,
)
from distributary.tools.diagnosis import _machine as machine
from distributary.tools.diagnosis._links import Link, Meeting, link_checks
from distributary.tools.diagnosis._machine import Check, Json
from distributary.variables import Variable

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
        yield from (machine.versions(), machine.keras(os.environ), machine.cluster(place))
        yield from (machine.ports(place), machine.host_name(place), machine.memory())


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
        yield from (machine.devices(num_devices), machine.thread_pool())
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


# How long all-reduces take, compared with the speed of the hardware.

_REPEATS: Final = {4: 40, 1 << 16: 40, 1 << 20: 20, 1 << 24: 6}  # by size in bytes
# Half of what is possible is normal. A twentieth means a wrong network, or a machine that cannot
# keep up.
_LOW_SHARE = 0.05

_COPY_BYTES = 1 << 26
_COPY_REPEATS = 5

# Bytes per second that one GPU of each model sends over NVLink.
_NVLINK: Final = {
    "NVIDIA A100-SXM4-40GB": 300e9,
    "NVIDIA A100-SXM4-80GB": 300e9,
    "NVIDIA H100 80GB HBM3": 450e9,
    "NVIDIA H200": 450e9,
}


def all_reduce(mesh: Mesh, network_bytes_per_second: float | None) -> Check:
    """All-reduces arrays of several sizes over all replicas, and compares with the hardware.

    All processes of the mesh must call it.

    Args:
        mesh: The replicas.
        network_bytes_per_second: Rate of the slowest link between processes; None if there is only
            one process.
    """
    if mesh.size == 1:
        return Check("all-reduce", "skipped", "there is only one replica")
    bound, basis = _bound(mesh, network_bytes_per_second)
    rows: list[dict[str, Json]] = []
    for size, repeats in _REPEATS.items():
        seconds, right = _timed(mesh, [size], repeats)
        if not right:
            detail = f"the sum of {format_bytes(size)} over {mesh.size} replicas is wrong"
            fix = (
                "Compare the versions of jax, the driver and NCCL with those that JAX supports;"
                " check the memory of the devices"
            )
            return Check("all-reduce", "problem", detail, fix)
        median = statistics.median(seconds)
        rows.append({"bytes": size, "seconds": median, "bytes_per_second": size / median})
    largest = rows[-1]
    share = None if bound is None else bound * largest["bytes_per_second"]
    times = ", ".join(f"{format_bytes(r['bytes'])} {_format_seconds(r['seconds'])}" for r in rows)
    speed = basis
    if share is not None:
        speed = (
            f"the largest takes {1 / share:.1f} times as long as {basis} (expected: below"
            f" {1 / _LOW_SHARE:.0f} times)"
        )
    detail = f"{mesh.size} replicas: {times}; {speed}"
    numbers = {"replicas": mesh.size, "sizes": rows, "share_of_hardware": share, "hardware": basis}
    cure = None
    if share is not None and share < _LOW_SHARE:
        cure = _fix_of_slow(mesh, between_processes=network_bytes_per_second is not None)
    return Check("all-reduce", "warning" if cure else "ok", detail, cure, numbers)


def all_reduce_seconds(mesh: Mesh, sizes: Sequence[int], repeats: int) -> float:
    """Returns the median seconds of all-reduces of these sizes, in sequence in one program.

    Args:
        mesh: The replicas.
        sizes: Bytes of each array.
        repeats: Number of measurements.
    """
    return statistics.median(_timed(mesh, sizes, repeats)[0])


def copy_bytes_per_second() -> float:
    """Returns how fast one thread copies memory."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    copy = partial(np.copyto, target, source)
    return _COPY_BYTES / min(timeit.repeat(copy, number=1, repeat=_COPY_REPEATS))


def _timed(mesh: Mesh, sizes: Sequence[int], repeats: int) -> tuple[list[float], bool]:
    """Returns the seconds of every repetition, and whether the sums are right."""
    replicas = NamedSharding(mesh, P(REPLICA_AXIS))
    values = np.array(local_replicas(replicas), np.float32) + 1
    arrays = [
        put_stacked(np.repeat(values[:, None], max(1, size // 4), axis=1), replicas)
        for size in sizes
    ]

    def reduce(rows: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.psum(row, REPLICA_AXIS) for row in rows]

    call = jax.jit(
        jax.shard_map(reduce, mesh=mesh, in_specs=P(REPLICA_AXIS), out_specs=P(REPLICA_AXIS))
    )
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        sums = jax.block_until_ready(call(arrays))
        seconds.append(time.perf_counter() - start)
    expected = mesh.size * (mesh.size + 1) / 2
    shards = [shard.data for total in sums for shard in total.addressable_shards]
    right = all(bool((np.asarray(data) == expected).all()) for data in shards)
    return seconds[1:], right  # without the first run, which compiles


def _bound(mesh: Mesh, network_bytes_per_second: float | None) -> tuple[float | None, str]:
    """Returns the fewest seconds per byte that the hardware needs, and the reason."""
    device = mesh.devices.flat[0]
    if network_bytes_per_second is not None:
        num_processes = len({d.process_index for d in mesh.devices.flat})
        ring = 2 * (num_processes - 1) / num_processes
        rate = f"{network_bytes_per_second / 1e9:.2f} GB/s"
        return ring / network_bytes_per_second, f"a ring over the slowest link, {rate}"
    if device.platform == "cpu":
        rate_of_copy = copy_bytes_per_second()
        return mesh.size / rate_of_copy, f"copying the arrays at {rate_of_copy / 1e9:.1f} GB/s"
    if device.device_kind in _NVLINK:
        rate_of_link = _NVLINK[device.device_kind]
        ring = 2 * (mesh.size - 1) / mesh.size
        return ring / rate_of_link, f"a ring over NVLink, {rate_of_link / 1e9:.0f} GB/s"
    return None, f"the expected speed of {device.device_kind} is not known"


def _fix_of_slow(mesh: Mesh, *, between_processes: bool) -> str:
    if between_processes:
        return (
            "Look for other programs with `top` on every host; on GPUs, NCCL_DEBUG=INFO shows which"
            " network NCCL uses"
        )
    if mesh.devices.flat[0].platform == "cpu":
        return "Look for other programs with `top`, and use a machine that is not busy"
    return "Run `nvidia-smi topo -m` to see how the GPUs are connected, and set NCCL_DEBUG=INFO"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


# A short training: it must learn, replicas must agree, and one device must get the same.

_NUM_STEPS = 60
_GLOBAL_BATCH_SIZE = 64  # at least; all replicas get the same number of examples
_HIDDEN = 32
_LEARNING_RATE = 0.5
_MAX_DIFFERENCE = 1e-3  # for float32, because sums are computed in another order


def training(strategy: Strategy) -> Check:
    """Trains a small network; all processes of the strategy must call it."""
    images, labels = _data()
    num_replicas = strategy.num_replicas_in_sync
    batch_size = num_replicas * math.ceil(_GLOBAL_BATCH_SIZE / num_replicas)
    losses, weights, same = _trained(strategy, images, labels, batch_size)
    device = local_devices_of(strategy.extended.mesh.devices.flat[0].platform.upper())[0]
    _, expected, _ = _trained(OneDeviceStrategy(device), images, labels, batch_size)
    difference = float(max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)))
    detail = (
        f"{_NUM_STEPS} steps, {num_replicas} replicas: loss {losses[0]:.2f} to {losses[-1]:.2f}"
    )
    numbers = {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "difference_to_one_device": difference,
        "replicas_agree": same,
    }
    if not losses[-1] < losses[0] / 2:
        problem = "the network does not learn"
    elif not same:
        problem = "the replicas have different weights"
    elif not difference < _MAX_DIFFERENCE:
        problem = f"its weights differ from those of one device by {difference:.1e}"
    else:
        agreement = (
            f"all replicas have the same weights, within {difference:.0e} of those of one device"
        )
        return Check("training", "ok", f"{detail}; {agreement}", numbers=numbers)
    fix = (
        "Leave out one device at a time to find the one that computes wrong results; compare the"
        " versions of jax and the driver with those that JAX supports"
    )
    return Check("training", "problem", f"{detail}; {problem}", fix, numbers)


def _data() -> tuple[np.ndarray, np.ndarray]:
    """Returns images `[n, 64]` and their labels `[n]`: ten images with noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(1024, dtype=np.int32) % 10
    noise = rng.normal(0.0, 0.3, (1024, 64))
    return (rng.random((10, 64))[labels] + noise).astype(np.float32), labels


def _trained(
    strategy: Strategy, images: np.ndarray, labels: np.ndarray, batch_size: int
) -> tuple[list[float], list[np.ndarray], bool]:
    """Returns the loss of every step, the weights, and whether they are equal on all replicas."""
    rng = np.random.default_rng(1)
    sizes = ((images.shape[1], _HIDDEN), (_HIDDEN, 10))
    with strategy.scope():
        kernels = [Variable(rng.normal(0, n**-0.5, (n, m)).astype(np.float32)) for n, m in sizes]
        biases = [Variable(np.zeros(m, np.float32)) for _, m in sizes]
    variables = [*kernels, *biases]

    def summed_loss(x: jax.Array, y: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            hidden = jax.nn.relu(x @ kernels[0].value() + biases[0])
            scores = jax.nn.log_softmax(hidden @ kernels[1].value() + biases[1])
        return -jnp.take_along_axis(scores, y[:, None], axis=1).sum()

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = value_and_grad(summed_loss, variables)(x, y)
        loss, gradients = _context().all_reduce("SUM", (loss, gradients))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(_LEARNING_RATE / batch_size * gradient)
        return loss / batch_size

    def copies() -> jax.Array:
        flat = jnp.concatenate([jnp.ravel(v.value()) for v in variables])
        return _context().all_gather(flat[None], axis=0)

    examples = Dataset.from_tensor_slices((images, labels)).repeat()
    batches = strategy.experimental_distribute_dataset(examples.batch(batch_size).take(_NUM_STEPS))
    losses = [strategy.run(step, args=batch) for batch in batches]
    gathered = np.asarray(strategy.experimental_local_results(strategy.run(copies))[0])
    same = bool((gathered == gathered[0]).all())
    results = [float(np.asarray(strategy.experimental_local_results(loss)[0])) for loss in losses]
    return results, [np.asarray(v.value()) for v in variables], same


def _context() -> ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context
