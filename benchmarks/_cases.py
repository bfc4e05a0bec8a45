"""What is measured: the cases of every benchmark, with the bars that ratios must not exceed."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from _harness import Case, Pair, Served, Settings, pair
from _processes import Process
from _workloads import FIT_WORKLOADS, ROW_BATCH, STEP_WORKLOADS

__all__ = ["BENCHMARKS", "Benchmark", "all_reduce", "fit", "overlap", "served", "step"]

TWO_WORKERS = "2 workers"
ALL_REDUCE_BYTES = (4, 1_000_000, 40_000_000)
REPLICAS = (1, 2, 4)

EPOCHS = {
    "mlp32": 960,
    "mlp256": 320,
    "transformer32": 24,
    "cnn64": 64,
    "resnet18": 4,
    "wide256_dense": 64,
    "wide256_adam": 16,
}
"""Steps of an epoch of `fit`."""

FUSED_WORKLOADS = ("mlp32", "cnn64")
"""Where distributary and Keras are also measured with 16 steps per execution."""

KERAS_WORKLOADS = ("resnet18", "wide256_dense", "wide256_adam")
"""Where nothing is written by hand."""

LAYERED_WORKLOADS = ("transformer32",)
"""Where layers cost more than the hand-written formulas, so that the loop is measured with both."""

STEP_BARS = {"mlp32": 1.15, "mlp256": 1.05, "transformer32": 1.05, "wide256": 1.15}
"""Time per step over hand-written JAX, median over the rounds; nothing is asked of others."""

_ONE_OR_TWO = (1, 2)
FIT_BARS: dict[tuple[str, str, str], tuple[tuple[int, ...], float]] = {
    ("mlp32", "distributary", "handwritten"): (_ONE_OR_TWO, 1.15),
    ("mlp32", "distributary", "tensorflow"): ((2,), 1 / 8),
    ("mlp32", "distributary", "data_parallel"): ((2,), 1.0),
    ("mlp32", "distributary_16", "handwritten"): (_ONE_OR_TWO, 1 / 1.2),
    ("mlp32", "distributary_16", "keras_16"): ((1,), 1 / 2),
    ("mlp32", "distributary_16", "data_parallel_16"): ((2,), 1 / 2),
    ("cnn64", "distributary_16", "distributary"): (_ONE_OR_TWO, 1.0),
    ("mlp256", "distributary", "handwritten"): (REPLICAS, 1.10),
    ("transformer32", "distributary", "handwritten"): (REPLICAS, 1.10),
    ("transformer32", "distributary", "handwritten_keras"): (REPLICAS, 1.05),
    ("cnn64", "distributary", "handwritten"): ((2,), 1.05),
    ("cnn64", "distributary", "tensorflow"): ((2,), 1.0),
    ("cnn64", "distributary", "data_parallel"): ((2,), 1.0),
    **{(name, "distributary", "keras"): ((1,), 1.0) for name in FIT_WORKLOADS},
}
"""Numbers of replicas for which `ours / theirs` of a workload's time per step has a bar, and it."""

START_WORKLOADS = ("mlp32", "transformer32", "resnet18")
START_BARS = {1: 1.05, 2: 1.1}
MEMORY_BAR = 1.05

STEPS = ("handwritten", "distributary", "control")
WIDE, WIDE_OF_TORCH = "wide256", "wide256_dense"
WORKER_EPOCHS = {"mlp32": 320, "mlp256": 160, "transformer32": 16, WIDE: 0}
WORKER_BAR, ALL_REDUCE_BAR, WORKER_START_BAR_SECONDS = 1.05, 1.1, 3.0
WORKER_BARS_OF_OTHERS = {
    "mlp32": {"tensorflow": 1.0, "torch": 1.0},
    "mlp256": {"tensorflow": 1.0, "torch": 1.15},
    "transformer32": {"tensorflow": 0.5, "torch": 1.15},
    WIDE: {"torch": 1 / 3},
}

FLOW_BAR = 1.05
FLOWS = (
    *("for over rows", "for over a range", "while", "if in a loop", "append in a loop"),
    *("gradient of for", "gradient of append"),
)
HOST_BAR_MICROSECONDS = 60.0
IMPORT_BAR = 1.1
SAVE_BAR_SECONDS = 0.3
NUMPY_BAR, TF_DATA_BAR, GRAIN_BAR = 1 / 0.9, 1 / 3, 1 / 50
DEVICE_PUT_BAR, OVERLAP_BAR, READ_BAR = 1.1, 1.1, 1 / 0.8
SERVER_BARS: Mapping[str, tuple[float, float | None]] = {
    "mlp32": (1 / 1.5, 0.6),
    "embedding256": (1 / 1.2, 0.9),
    "empty": (1 / 10, None),
}
"""Time and CPU time per step over TensorFlow's."""


def served(process: Process, **more: Any) -> dict[str, Served]:
    """Returns all peers of a process, by its names of them."""
    return {name: Served(process, name, **more) for name in process.names}


# Steps


def step(workload: str, replicas: int, bar: float | None) -> Case:
    """Returns steps of `strategy.run`, by hand, and of `tf.distribute`."""
    arguments = {"workload": workload, "num_replicas": replicas}
    own = Process("_jax_peers", STEPS, arguments, devices=replicas)
    tensorflow = Process("_tensorflow", ("loop",), arguments, library="tensorflow")
    return Case(
        f"`strategy.run`, {workload}",
        str(replicas),
        {**served(own), "tensorflow": Served(tensorflow, "loop")},
        [
            pair("distributary", "handwritten", bar),
            pair("distributary", "tensorflow"),
            pair("control", "handwritten"),
        ],
        workload=workload,
    )


def _step_time(settings: Settings) -> Iterator[Case]:
    for workload in STEP_WORKLOADS:
        for replicas in REPLICAS:
            yield step(workload, replicas, STEP_BARS.get(workload))


def _host_overhead(settings: Settings) -> Iterator[Case]:
    for replicas in _ONE_OR_TWO:
        process = Process("host_overhead", STEPS, {"num_replicas": replicas}, devices=replicas)
        yield Case(
            "the host's part of a cached `run`",
            str(replicas),
            served(process, num_steps=300),
            [pair("distributary", "handwritten", most_more=HOST_BAR_MICROSECONDS)],
            "µs",
        )


def _memory(settings: Settings) -> Iterator[Case]:
    kinds = {"program": "memory of the program", "resident": "resident memory"}
    for workload in STEP_WORKLOADS:
        for replicas in REPLICAS:
            yield _in_memory(step(workload, replicas, MEMORY_BAR), *kinds.items())


def _in_memory(case: Case, *kinds: tuple[str, str]) -> Case:
    """Returns the memory that peers of JAX take, by kind and how its row is called."""
    peers = {
        name: replace(one, process=replace(one.process, names=(one.name,)))
        for name, one in case.peers.items()
        if one.process.library == "jax" and name != "control"
    }
    fresh = {kind: f"{what}, {case.workload}" for kind, what in kinds}
    return replace(case, peers=peers, unit="MiB", section="memory", fresh=fresh)


def _central_storage(settings: Settings) -> Iterator[Case]:
    names = ("mirrored", "central")
    for workload in ("mlp256", "transformer32", "wide256_dense"):
        for replicas in (2, 4):
            process = Process("_jax_peers", names, {"workload": workload}, devices=replicas + 1)
            case = Case(
                f"central storage, {workload}",
                str(replicas),
                served(process, num_checked=10, group="central"),
                [pair("central", "mirrored")],
                section="step",
                workload=workload,
            )
            yield case
            yield _in_memory(
                case, ("program", "memory of a step"), ("arrays", "memory between steps")
            )


# `fit`


def fit(workload: str, replicas: int, names: Mapping[str, str]) -> Case:
    """Returns epochs of `fit`, each peer in a process of its own.

    Args:
        workload: What is trained.
        replicas: How many there are.
        names: Peers of `_jax_peers`, or `"tensorflow"`, by what the row calls them.
    """
    num_steps = EPOCHS[workload]
    arguments = {"workload": workload, "num_replicas": replicas, "num_steps": num_steps}
    own = Process("_jax_peers", (), arguments, devices=replicas)
    tensorflow = Process("_tensorflow", ("fit",), arguments, library="tensorflow")
    peers = {
        name: Served(
            tensorflow if name == "tensorflow" else replace(own, names=(served,)),
            "fit" if name == "tensorflow" else served,
            num_steps,
            num_checked=2,
            group="fit",
        )
        for name, served in names.items()
    }
    pairs = list(_fit_pairs(workload, replicas, list(names)))
    return Case(f"`fit`, {workload}", str(replicas), peers, pairs, "ms/step", "step", workload)


def _fit_time(settings: Settings) -> Iterator[Case]:
    for workload in FIT_WORKLOADS:
        for replicas in REPLICAS:
            yield fit(workload, replicas, dict(_fit_names(workload, replicas)))
    for workload in FIT_WORKLOADS:
        for replicas in REPLICAS:
            alone = "keras" if replicas == 1 else "data_parallel"
            alike = fit(workload, replicas, {"distributary": "fit", alone: alone})
            case = replace(alike, pairs=[pair("distributary", alone, MEMORY_BAR)])
            yield _in_memory(case, ("resident", "resident memory in `fit`"))
            if workload in START_WORKLOADS and replicas <= 2:
                yield replace(
                    fit(workload, replicas, {"distributary": "fit/start", "keras": "keras/start"}),
                    pairs=[pair("distributary", "keras", START_BARS[replicas])],
                    unit="s",
                    section="start",
                    fresh={"seconds": f"until the first step of `fit`, {workload}"},
                )


def _fit_names(workload: str, replicas: int) -> Iterator[tuple[str, str]]:
    alone = "keras" if replicas == 1 else "data_parallel"
    if workload in KERAS_WORKLOADS:
        yield from (("distributary", "fit"), (alone, alone))
        if replicas == 1:  # on more, TensorFlow normalizes by the rows of a replica
            yield "tensorflow", "fit"
        return
    yield "handwritten", "fit_handwritten"
    for name, served in (("distributary", "fit"), (alone, alone)):
        yield name, served
        if workload in FUSED_WORKLOADS:
            yield f"{name}_16", f"{served}/16"
    yield "control", "fit_handwritten"
    if workload in LAYERED_WORKLOADS:
        yield "handwritten_keras", "fit_handwritten_keras"
    yield "tensorflow", "fit"


def _fit_pairs(workload: str, replicas: int, names: Sequence[str]) -> Iterator[Pair]:
    """Yields what is alike, or has a bar."""
    for ours in ("distributary", "distributary_16"):
        for theirs in names:
            counts, limit = FIT_BARS.get((workload, ours, theirs), ((), None))
            bar = limit if replicas in counts else None
            is_alike = ours.endswith("_16") == theirs.endswith("_16")
            is_other = not theirs.startswith(("distributary", "control"))
            if bar is not None or (is_alike and is_other):
                fused = ", 16 steps per execution" if ours.endswith("_16") else ""
                layers = " around the Keras model" if theirs == "handwritten_keras" else ""
                yield pair(ours, theirs, bar, f"`fit`{fused}, {workload}{layers}")


# Two workers


def _multi_worker_time(settings: Settings) -> Iterator[Case]:
    for workload in WORKER_EPOCHS:
        yield _trained_by_workers(workload)
    for num_bytes in ALL_REDUCE_BYTES:
        yield all_reduce(num_bytes)
    alone = Process("_jax_peers", ("start",), {"workload": "mlp32"}, workers=1)
    both = replace(alone, workers=2)
    yield Case(
        "start, mlp32",
        TWO_WORKERS,
        {"2 workers": Served(both, "start"), "1 worker": Served(alone, "start")},
        [pair("2 workers", "1 worker", most_more=WORKER_START_BAR_SECONDS)],
        "s",
        "start",
        fresh={"seconds": "start, mlp32"},
    )


def _trained_by_workers(workload: str) -> Case:
    """Returns steps and `fit`; the loops of TensorFlow and torch, which read no data, with both."""
    num_steps = WORKER_EPOCHS[workload]
    epochs = ["fit_handwritten", "fit"] if num_steps else []
    epochs += ["fit_handwritten_keras"] * (workload in LAYERED_WORKLOADS)
    own = Process(
        "_jax_peers", (*STEPS, *epochs), {"workload": workload, "num_steps": num_steps}, workers=2
    )
    arguments = {"workload": workload}
    tensorflow = Process("_tensorflow", ("loop",), arguments, "tensorflow", workers=2)
    arguments = {"workload": WIDE_OF_TORCH if workload == WIDE else workload}
    torch = Process("_torch", ("loop",), arguments, "torch", workers=2)
    pairs = []
    for ours, prefix, what in (
        ("distributary", "", f"`strategy.run`, {workload}"),
        ("fit", "fit_", f"`fit`, {workload}"),
    ):
        around = f"{what} around the Keras model"
        pairs += [
            pair(ours, f"{prefix}handwritten", WORKER_BAR, what),
            pair(ours, f"{prefix}handwritten_keras", WORKER_BAR, around),
            *(
                pair(ours, theirs, WORKER_BARS_OF_OTHERS[workload].get(theirs), what)
                for theirs in ("tensorflow", "torch")
            ),
        ]
    return Case(
        f"two workers, {workload}",
        TWO_WORKERS,
        {
            **{name: Served(own, name) for name in STEPS},
            **{name: Served(own, name, num_steps, num_checked=2, group="fit") for name in epochs},
            "tensorflow": Served(tensorflow, "loop"),
            "torch": Served(torch, "loop"),
        },
        pairs,
        section="training",
        workload=workload,
    )


def all_reduce(num_bytes: int) -> Case:
    """Returns calls that sum an array over the workers, and wait for it."""
    whats = {
        "reduce": "`reduce` of",
        "reduce_to": "`reduce_to` of",
        "run": "`all_reduce` in `run`,",
    }
    names = ("psum", *whats, "control")
    own = Process("_jax_peers", names, {"num_bytes": num_bytes}, workers=2)
    torch = Process("_torch", ("all_reduce",), {"num_bytes": num_bytes}, "torch", workers=2)
    size = f"{num_bytes / 1e6:g} MB" if num_bytes >= 1e6 else f"{num_bytes} B"
    return Case(
        f"all-reduce of {size}",
        TWO_WORKERS,
        {
            **served(own, num_checked=2),
            "torch": Served(torch, "all_reduce", num_checked=2),
        },
        [
            pair(ours, theirs, bar, f"{what} {size}")
            for ours, what in whats.items()
            for theirs, bar in (("psum", ALL_REDUCE_BAR), ("torch", None))
        ],
        "ms",
        "allreduce",
        must_fall=False,
    )


# Parameter servers


def _parameter_server(settings: Settings) -> Iterator[Case]:
    for workload, (bar, cpu_bar) in SERVER_BARS.items():
        own = Process("_ps_tasks", (workload,), workers=2, servers=2)
        tensorflow = replace(own, module="_ps_tensorflow", library="tensorflow")
        peers = {"distributary": own, "tensorflow": tensorflow}
        yield Case(
            f"parameter servers, {workload.replace('empty', 'an empty step')}",
            "2 workers, 2 servers",
            # Asynchronous, so that no two runs have the same losses.
            {name: Served(process, workload, group=name) for name, process in peers.items()},
            [pair("distributary", "tensorflow", bar)],
            workload=workload,
            must_fall=workload != "empty",
            cpu_pairs=[pair("distributary", "tensorflow", cpu_bar)],
        )


# Input, import, files


def _input_time(settings: Settings) -> Iterator[Case]:
    what = "a batch from memory"
    pairs = [
        pair("ours", "numpy", NUMPY_BAR, f"{what}, over NumPy"),
        pair("ours", "grain", GRAIN_BAR, f"{what}, over grain"),
        pair("ours", "tf.data", TF_DATA_BAR, f"{what}, over tf.data"),
    ]
    # Many steps: tf.data reads ahead while others have their turn.
    num_steps = {"numpy": 1000, "ours": 1000, "tf.data": 1000, "grain": 4}
    if importlib.util.find_spec("grain") is None:
        del num_steps["grain"]
    yield _input("memory", what, "-", num_steps, pairs)
    for replicas in (2, 4):
        yield _input(
            "devices",
            "a batch on the devices, over `device_put`",
            replicas,
            dict.fromkeys(("by hand", "ours", "control"), 500),
            [pair("ours", "by hand", DEVICE_PUT_BAR), pair("control", "by hand")],
            num_replicas=replicas,
        )
    for replicas in (2, 4):
        yield overlap(replicas, (ROW_BATCH * replicas, 1024, 4))
    num_bytes = 10**8 if settings.quick else 10**9
    for batch in (256, 1024, 4096):
        yield _input(
            "files",
            f"{num_bytes / 1e9:g} GB of files by {batch * 4 >> 10} MiB, over `read`",
            "-",
            {"read": 1, "ours": 1},
            [pair("ours", "read", READ_BAR)],
            num_bytes=num_bytes,
            batch=batch,
        )


def overlap(replicas: int, size: tuple[int, int, int]) -> Case:
    """Returns steps whose batches take time to load, of a size that `input_time` describes."""
    pairs = [pair("with loader", "alone", OVERLAP_BAR), pair("without reading ahead", "alone")]
    num_steps = dict.fromkeys(("alone", "with loader", "without reading ahead"), 30)
    return _input(
        "overlap",
        "a step with a loader",
        replicas,
        num_steps,
        pairs,
        num_replicas=replicas,
        size=size,
    )


def _input(
    section: str,
    what: str,
    replicas: int | str,
    num_steps: Mapping[str, int],
    pairs: Sequence[Pair],
    **arguments: object,
) -> Case:
    names = [name for name in num_steps if name != "tf.data"]
    devices = replicas if isinstance(replicas, int) else 1
    own = Process("input_time", names, {"section": section, **arguments}, devices=devices)
    tensorflow = Process("_tensorflow", ("tf.data",), library="tensorflow")
    peers = {
        name: Served(tensorflow if name == "tf.data" else own, name, count)
        for name, count in num_steps.items()
    }
    return Case(what, str(replicas), peers, pairs, "ms", section)


def _control_flow(settings: Settings) -> Iterator[Case]:
    for flow in FLOWS:
        process = Process("control_flow", ("handwritten", "distributary"), {"flow": flow})
        pairs = [pair("distributary", "handwritten", FLOW_BAR)]
        yield Case(f"AutoGraph, {flow}", "1", served(process), pairs, "ms", must_fall=False)


def _import_time(settings: Settings) -> Iterator[Case]:
    process = Process("import_time", ("jax", "distributary"))
    yield Case(
        "`import distributary`, over `import jax`",
        "-",
        served(process, num_steps=1),
        [pair("distributary", "jax", IMPORT_BAR)],
        "s",
    )


def _save_time(settings: Settings) -> Iterator[Case]:
    process = Process("save_time", ("save", "numpy"), devices=2)
    case = Case(
        "a save of 256 MiB",
        "2",
        served(process, num_steps=1),
        [pair("save", "numpy", most_more=SAVE_BAR_SECONDS)],
        "s",
    )
    yield case
    alone = replace(process, names=("save",))
    # It touches memory that the process did not have before.
    yield replace(case, peers={"save": Served(alone, "save")}, fresh={"seconds": "the first save"})


@final
@dataclass(frozen=True)
class Benchmark:
    """Cases that have a result file.

    Attributes:
        cases: Yields them.
        rounds: Default of `--rounds`, also with `--quick`.
        block_seconds: The same of `--block-seconds`.
        platform: Default of `--platform`.
    """

    cases: Callable[[Settings], Iterable[Case]]
    rounds: tuple[int, int]
    block_seconds: tuple[float, float] = (0.4, 0.1)
    platform: str = "cpu"


BENCHMARKS: Mapping[str, Benchmark] = {
    "control_flow": Benchmark(_control_flow, (15, 3)),
    "import_time": Benchmark(_import_time, (15, 3)),
    "host_overhead": Benchmark(_host_overhead, (20, 4)),
    "step_time": Benchmark(_step_time, (15, 3)),
    "fit_time": Benchmark(_fit_time, (9, 2)),
    "multi_worker_time": Benchmark(_multi_worker_time, (11, 3)),
    "parameter_server": Benchmark(_parameter_server, (7, 2), (3.0, 1.0)),
    "input_time": Benchmark(_input_time, (15, 3)),
    "memory": Benchmark(_memory, (5, 1)),
    "save_time": Benchmark(_save_time, (9, 2)),
    "central_storage": Benchmark(_central_storage, (9, 3)),
}
