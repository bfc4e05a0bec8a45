"""How long is a step of Keras' `model.fit` under a strategy, next to everything it competes with?

Four sections, see `--sections`:

    step    Time per step of one epoch of `fit` on NumPy arrays in memory, without callbacks. Every
            peer is a process of its own that works only when it is its turn:
              handwritten    JAX loop: shuffled indices, device_put, jit + shard_map + psum
              control        the same a second time: what a ratio of two equal peers looks like
              handwritten_keras  the same loop around the Keras model, where layers matter most
              distributary   fit under MirroredStrategy
              keras          fit of Keras as it is, on one device
              data_parallel  fit under keras.distribution.DataParallel, on several
              tensorflow     fit under tf.distribute.MirroredStrategy, if it is installed
            A name ending in _16 is the same with steps_per_execution=16.
    host    What `fit` adds per step to calling the compiled step on the same batches, one replica.
    start   From calling `fit` to the end of its first step, in fresh processes.
    memory  Peak resident memory while `fit` runs, compilation excluded.

    python benchmarks/fit_time.py --tensorflow-python /path/with/tensorflow/bin/python
    python benchmarks/fit_time.py --quick --sections step --only mlp32 --replicas 1,2
"""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import _command_line
import _processes
import _report
import _served
import _tensorflow
import _timing
import _workloads
from _epochs import Epochs, FitPeer

Json: TypeAlias = Any
Rows: TypeAlias = Iterator[dict[str, Json]]

SECTIONS = ("step", "host", "start", "memory")
PEERS = (
    "handwritten",
    "distributary",
    "control",
    "handwritten_keras",
    "keras",
    "data_parallel",
    "tensorflow",
)

TOLERANCE = 1e-4
"""Largest relative difference of the mean loss of a short epoch between two peers."""

STEPS_PER_EXECUTION = 16
FUSED_WORKLOADS = ("mlp32", "cnn64")
"""Where distributary and Keras are also measured with `STEPS_PER_EXECUTION`."""

LAYERED_WORKLOADS = ("transformer32",)
"""Where layers cost more than the hand-written formulas, so that the loop is measured with both."""

HOST_BAR_MICROSECONDS = 120.0
START_BAR = 1.2
MEMORY_BAR = 1.05

_CHECK_EPOCHS = 2
_CHILD_TIMEOUT_SECONDS = 3600.0
_FOLDER = Path(__file__).resolve().parent
_MEBIBYTE = 2**20


EPOCHS: Mapping[str, Epochs] = {
    "mlp32": Epochs(960, 240),
    "mlp256": Epochs(320, 80),
    "transformer32": Epochs(24, 8),
    "cnn64": Epochs(64, 16),
}
QUICK_EPOCHS: Mapping[str, Epochs] = {
    "mlp32": Epochs(256, 64),
    "mlp256": Epochs(96, 32),
    "transformer32": Epochs(8, 4),
    "cnn64": Epochs(32, 16),
}


@dataclass(frozen=True)
class Bar:
    """`ours / theirs` of a workload's time per step must not exceed `limit`.

    `theirs` may be `keras*`: whichever of keras and data_parallel there is.
    """

    workload: str
    replicas: tuple[int, ...]
    ours: str
    theirs: str
    limit: float


BARS = (
    Bar("mlp32", (1, 2), "distributary", "handwritten", 1.15),
    Bar("mlp32", (2,), "distributary", "tensorflow", 1 / 8),
    Bar("mlp32", (2,), "distributary", "data_parallel", 1.0),
    Bar("mlp32", (1, 2), "distributary_16", "handwritten", 1 / 1.2),
    Bar("mlp32", (1, 2), "distributary_16", "keras*_16", 1 / 2),
    Bar("cnn64", (1, 2), "distributary_16", "distributary", 1.0),
    Bar("mlp256", (1, 2, 4), "distributary", "handwritten", 1.10),
    Bar("transformer32", (1, 2, 4), "distributary", "handwritten", 1.10),
    Bar("transformer32", (1, 2, 4), "distributary", "handwritten_keras", 1.05),
    Bar("cnn64", (2,), "distributary", "handwritten", 1.05),
    Bar("cnn64", (2,), "distributary", "tensorflow", 1.0),
    Bar("cnn64", (2,), "distributary", "data_parallel", 1.0),
    *(Bar(name, (1,), "distributary", "keras", 1.0) for name in _workloads.FIT_WORKLOADS),
)


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a measurement failed or losses differ, else 0."""
    load_before = _report.load_average()
    tensorflow_version = None
    if "tensorflow" in arguments.peers:
        tensorflow_version = _tensorflow.find_tensorflow(arguments.tensorflow_python)
        if tensorflow_version is None:
            print("tensorflow: not installed (see --tensorflow-python)", file=sys.stderr)
            arguments.peers.remove("tensorflow")
    run = {
        "step": _run_step_section,
        "host": _run_host_section,
        "start": _run_start_section,
        "memory": _run_memory_section,
    }
    problems: list[str] = []
    rows: list[dict[str, Json]] = []
    settings = {
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "tolerance": TOLERANCE,
        "steps_per_execution": STEPS_PER_EXECUTION,
        "host_bar_microseconds": HOST_BAR_MICROSECONDS,
        "start_bar": START_BAR,
        "memory_bar": MEMORY_BAR,
    }
    more_versions = {"tensorflow": tensorflow_version or "not measured"}
    earlier = []
    if arguments.add:
        earlier = _report.rows_to_add_to("fit_time", settings, more_versions, arguments.output)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for section in arguments.sections:
            for row in run[section](arguments, problems):
                rows.append({"section": section, **row})
    except KeyboardInterrupt:
        problems.append("interrupted; what had been measured is written")
    for section in arguments.sections:
        if own := [row for row in rows if row["section"] == section]:
            _PRINT[section](own)
    if rows:
        own_rows = set(map(_work_of, rows))
        _report.write(
            "fit_time",
            rows=[*(row for row in earlier if _work_of(row) not in own_rows), *rows],
            settings=settings,
            load_before=load_before,
            more_versions=more_versions,
            folder=arguments.output,
        )
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _work_of(row: dict[str, Json]) -> tuple[Json, ...]:
    return tuple(row.get(key) for key in ("section", "workload", "replicas", "way", "against"))


def measure(request: dict[str, Json]) -> dict[str, Json]:
    """What one process measures; runs in the child."""
    return {
        "step": _measure_step,
        "host": _measure_host,
        "start": _measure_start,
        "memory": _measure_memory,
    }[request["section"]](request)


def _run_child(
    request: dict[str, Json], num_replicas: int, problems: list[str]
) -> dict[str, Json] | None:
    """What a child measures, a second one if the first fails; a failure is a problem in any case.

    TensorFlow's processes were seen to crash now and then, by themselves.
    """
    for _ in range(2):
        try:
            return _processes.run_child(__file__, request, num_replicas, _CHILD_TIMEOUT_SECONDS)
        except _processes.ChildFailedError as error:
            problems.append(str(error))
    return None


def _selected(arguments: argparse.Namespace) -> list[_workloads.Workload]:
    return _workloads.select(arguments.only, _workloads.FIT_WORKLOADS)


# Time per step


def _run_step_section(arguments: argparse.Namespace, problems: list[str]) -> Rows:
    for workload in _selected(arguments):
        for num_replicas in arguments.replicas:
            names = _peers_of(workload, num_replicas, arguments.peers)
            epochs = (QUICK_EPOCHS if arguments.quick else EPOCHS)[workload.name]
            request = {
                "section": "step",
                "workload": workload.name,
                "replicas": num_replicas,
                "peers": names,
                "rounds": arguments.rounds,
                "epochs": [epochs.long, epochs.short],
                "tensorflow_python": arguments.tensorflow_python,
            }
            print(f"{workload.name}, {num_replicas} replicas ...", file=sys.stderr, flush=True)
            row = _run_child(request, num_replicas, problems)
            if row is not None:
                yield row
                problems.extend(_disagreements(row))


def _peers_of(workload: _workloads.Workload, num_replicas: int, wanted: Sequence[str]) -> list[str]:
    """The peers of one row, in the order of the first round."""
    absent = "data_parallel" if num_replicas == 1 else "keras"
    names = []
    for name in wanted:
        if name == absent:
            continue
        if name == "handwritten_keras" and workload.name not in LAYERED_WORKLOADS:
            continue
        names.append(name)
        if workload.name in FUSED_WORKLOADS and name in ("distributary", "keras", "data_parallel"):
            names.append(f"{name}_{STEPS_PER_EXECUTION}")
    return names


def _measure_step(request: dict[str, Json]) -> dict[str, Json]:
    workload = _workloads.WORKLOADS[request["workload"]]
    num_replicas = request["replicas"]
    epochs = Epochs(*request["epochs"])
    peers = [
        FitPeer(
            _start(
                name,
                workload,
                num_replicas,
                max(epochs.long, _workloads.CHECK_STEPS),
                request["tensorflow_python"],
            ),
            epochs,
        )
        for name in request["peers"]
    ]
    try:
        losses = {peer.name: peer.losses(_CHECK_EPOCHS) for peer in peers}
        seconds = _timing.interleave(
            peers, request["rounds"], {peer.name: epochs.long for peer in peers}
        )
        final_loss = {peer.name: peer.losses(1)[0] for peer in peers}
    finally:
        for peer in peers:
            peer.close()
    reference = peers[0].name
    # The first block does not count.
    marginal = {peer.name: peer.marginal_seconds[1:] for peer in peers}
    bars = [
        {
            "ours": bar.ours,
            "theirs": theirs,
            "limit": bar.limit,
            **_timing.summarize_ratio(seconds[bar.ours], seconds[theirs]),
            "marginal": statistics.median(marginal[bar.ours]) / statistics.median(marginal[theirs]),
        }
        for bar in BARS
        if bar.workload == workload.name and num_replicas in bar.replicas
        for theirs in [
            bar.theirs.replace("keras*", "keras" if num_replicas == 1 else "data_parallel")
        ]
        if bar.ours in seconds and theirs in seconds
    ]
    return {
        "workload": workload.name,
        "description": workload.description,
        "replicas": num_replicas,
        "steps_per_epoch": epochs.long,
        "steps_per_short_epoch": epochs.short,
        "peers": {
            name: {
                "milliseconds": _milliseconds(values),
                "marginal_milliseconds": _milliseconds(marginal[name]),
                "ratio": _timing.summarize_ratio(values, seconds[reference]),
                "losses": losses[name],
                "final_loss": final_loss[name],
            }
            for name, values in seconds.items()
        },
        "loss_difference": _timing.check_agreement(losses, reference),
        "bars": bars,
    }


def _start(
    name: str,
    workload: _workloads.Workload,
    num_replicas: int,
    max_steps: int,
    tensorflow_python: str,
) -> _served.ServedPeer:
    way = name.removesuffix(f"_{STEPS_PER_EXECUTION}")
    steps_per_execution = 1 if way == name else STEPS_PER_EXECUTION
    numbers = [workload.name, str(num_replicas), str(max_steps)]
    environ = _processes.environment(num_replicas)
    if way in ("handwritten", "control", "handwritten_keras"):
        model = "keras" if way == "handwritten_keras" else "jax"
        command = [sys.executable, str(_FOLDER / "_fit_handwritten.py"), model, *numbers]
        return _served.start_peer(name, command, environ)
    python = sys.executable
    if way == "tensorflow":
        python = tensorflow_python
        environ = {**_tensorflow.environment(), "KERAS_BACKEND": "tensorflow"}
    command = [python, str(_FOLDER / "_keras.py"), way, *numbers, str(steps_per_execution)]
    return _served.start_peer(name, command, environ)


def _milliseconds(seconds: Sequence[float]) -> dict[str, Json]:
    return {
        "min": 1e3 * min(seconds),
        "median": 1e3 * statistics.median(seconds),
        "rounds": [round(1e3 * value, 5) for value in seconds],
    }


def _disagreements(row: dict[str, Json]) -> list[str]:
    where = f"{row['workload']}, {row['replicas']} replicas"
    problems = []
    reference = next(iter(row["peers"].values()))["losses"]
    for name, peer in row["peers"].items():
        allowed = TOLERANCE * max(abs(loss) for loss in reference)
        difference = row["loss_difference"][name]
        if not difference <= allowed:
            problems.append(
                f"{where}: the mean loss of {name} is {difference:.1e} away from the hand-written"
                f" one within {_CHECK_EPOCHS} epochs of {_workloads.CHECK_STEPS} steps; at most"
                f" {allowed:.1e} is allowed."
            )
        if not peer["final_loss"] < peer["losses"][0]:
            problems.append(
                f"{where}: the loss of {name} went from {peer['losses'][0]:.4f} to"
                f" {peer['final_loss']:.4f}; it was expected to fall."
            )
    return problems


def _print_step(rows: list[dict[str, Json]]) -> None:
    print(
        "\nfit: milliseconds per step of an epoch, min and median over the rounds; marginal = per"
        " step more in an epoch; ratios to the hand-written loop.\n"
    )
    _report.print_table(
        [
            "workload",
            "R",
            "steps",
            "peer",
            "min",
            "median",
            "marginal",
            "ratio",
            "of min",
            "dloss",
        ],
        [
            [
                row["workload"],
                row["replicas"],
                row["steps_per_epoch"],
                name,
                peer["milliseconds"]["min"],
                peer["milliseconds"]["median"],
                peer["marginal_milliseconds"]["median"],
                peer["ratio"]["median"],
                peer["ratio"]["of_minima"],
                f"{row['loss_difference'][name]:.0e}",
            ]
            for row in rows
            for name, peer in row["peers"].items()
        ],
    )
    print()
    _report.print_table(
        ["workload", "R", "peer", "over", "ratio", "of min", "marginal", "bar", ""],
        [
            [
                row["workload"],
                row["replicas"],
                bar["ours"],
                bar["theirs"],
                bar["median"],
                bar["of_minima"],
                bar["marginal"],
                bar["limit"],
                _report.verdict(bar["median"], bar["limit"]),
            ]
            for row in rows
            for bar in row["bars"]
        ],
    )


# Time of the host


def _run_host_section(arguments: argparse.Namespace, problems: list[str]) -> Rows:
    for way in ("distributary", "keras"):
        if way not in arguments.peers:
            continue
        request = {
            "section": "host",
            "way": way,
            "rounds": 3 if arguments.quick else 2 * arguments.rounds,
            "steps": 500 if arguments.quick else 2000,
        }
        print(f"host, {way} ...", file=sys.stderr, flush=True)
        row = _run_child(request, 1, problems)
        if row is not None:
            yield row


def _measure_host(request: dict[str, Json]) -> dict[str, Json]:
    import jax
    import jax.numpy as jnp
    import keras
    import numpy as np
    from _keras import WAYS
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    batch_size, num_steps = 8, request["steps"]
    rng = np.random.default_rng(0)
    x = rng.random((num_steps * batch_size, 4)).astype(np.float32)
    y = rng.random((num_steps * batch_size, 1)).astype(np.float32)
    with WAYS[request["way"]](1):
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse")

    def fit() -> None:
        model.fit(x, y, batch_size=batch_size, verbose=0)

    fit()
    step = jax.jit(model.train_step, donate_argnums=0)
    parts = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    # Copies, as every step consumes its state.
    state = tuple([[jnp.array(v.value, copy=True) for v in part] for part in parts])

    def call(batches: Any) -> None:
        nonlocal state
        for batch in batches:
            logs, state = step(state, batch)
        jax.block_until_ready(logs)

    def bare() -> None:
        call(ArrayDataAdapter(x, y, batch_size=batch_size, shuffle=True).get_jax_iterator())

    def bare_numpy() -> None:
        indices = np.random.permutation(len(x)).reshape(num_steps, batch_size)
        call((x[chosen], y[chosen]) for chosen in indices)

    loops = {"fit": fit, "bare": bare, "bare_numpy": bare_numpy}
    microseconds: dict[str, list[float]] = {name: [] for name in loops}
    for round_number in range(-1, request["rounds"]):
        for name, loop in loops.items():
            start = time.perf_counter()
            loop()
            if round_number >= 0:  # the first round does not count
                microseconds[name].append(1e6 * (time.perf_counter() - start) / num_steps)
    overheads = [a - b for a, b in zip(microseconds["fit"], microseconds["bare"], strict=True)]
    return {
        "way": request["way"],
        "steps": num_steps,
        "microseconds": microseconds,
        "overhead_of_minima": min(microseconds["fit"]) - min(microseconds["bare"]),
        "overhead_median": statistics.median(overheads),
        "bar": HOST_BAR_MICROSECONDS,
    }


def _print_host(rows: list[dict[str, Json]]) -> None:
    print(
        "\nHost: microseconds per step of a model that computes next to nothing, one replica; bare"
        " = the compiled step called in a loop on Keras' batches, or on those NumPy picks.\n"
    )
    _report.print_table(
        [
            "peer",
            "fit min",
            "median",
            "bare min",
            "median",
            "NumPy min",
            "fit - bare of min",
            "bar",
            "",
            "median",
        ],
        [
            [
                row["way"],
                min(row["microseconds"]["fit"]),
                statistics.median(row["microseconds"]["fit"]),
                min(row["microseconds"]["bare"]),
                statistics.median(row["microseconds"]["bare"]),
                min(row["microseconds"]["bare_numpy"]),
                row["overhead_of_minima"],
                row["bar"] if row["way"] == "distributary" else None,
                _report.verdict(row["overhead_of_minima"], row["bar"])
                if row["way"] == "distributary"
                else None,
                row["overhead_median"],
            ]
            for row in rows
        ],
    )


# Against Keras, in fresh processes


def _run_start_section(arguments: argparse.Namespace, problems: list[str]) -> Rows:
    workloads = [_workloads.WORKLOADS["mlp32"]]
    counts = [count for count in arguments.replicas if count <= 2]
    return _run_pairs("start", START_BAR, workloads, counts, arguments, problems)


def _run_memory_section(arguments: argparse.Namespace, problems: list[str]) -> Rows:
    counts = arguments.replicas
    return _run_pairs("memory", MEMORY_BAR, _selected(arguments), counts, arguments, problems)


def _run_pairs(
    section: str,
    bar: float,
    workloads: Sequence[_workloads.Workload],
    counts: Sequence[int],
    arguments: argparse.Namespace,
    problems: list[str],
) -> Rows:
    """distributary and Keras in turns, every measurement in a process of its own."""
    for workload in workloads:
        for num_replicas in counts:
            ways = ("distributary", "keras" if num_replicas == 1 else "data_parallel")
            found: dict[str, list[Json]] = {way: [] for way in ways}
            print(f"{section}: {workload.name}, {num_replicas} ...", file=sys.stderr, flush=True)
            for _ in range(1 if arguments.quick else 5):
                for way in ways:
                    request = {
                        "section": section,
                        "way": way,
                        "workload": workload.name,
                        "replicas": num_replicas,
                    }
                    result = _run_child(request, num_replicas, problems)
                    if result is not None:
                        found[way].append(result["value"])
            ours, theirs = (
                statistics.median(values) if values and None not in values else None
                for values in found.values()
            )
            yield {
                "workload": workload.name,
                "replicas": num_replicas,
                "processes": found,
                "distributary": ours,
                "theirs": theirs,
                "against": ways[1],
                "ratio": ours / theirs if ours and theirs else None,
                "bar": bar,
            }


def _measure_start(request: dict[str, Json]) -> dict[str, Json]:
    """Seconds from the call of `fit` until the loss of its first step is on the host."""
    import keras
    from _keras import build_model

    workload = _workloads.WORKLOADS[request["workload"]]
    model = build_model(request["way"], workload, request["replicas"])
    x, y = workload.examples(4)
    ended: list[float] = []

    class FirstStep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])
            ended.append(time.perf_counter())
            self.model.stop_training = True

    start = time.perf_counter()
    model.fit(x, y, batch_size=workload.global_batch_size, verbose=0, callbacks=[FirstStep()])
    return {"value": ended[0] - start}


def _measure_memory(request: dict[str, Json]) -> dict[str, Json]:
    """Peak resident bytes while `fit` runs; of the whole life where Linux cannot reset it."""
    from _keras import KerasFit, build_model

    workload = _workloads.WORKLOADS[request["workload"]]
    num_steps = QUICK_EPOCHS[workload.name].long
    model = build_model(request["way"], workload, request["replicas"])
    peer = KerasFit(request["way"], model, workload, max(num_steps, _workloads.CHECK_STEPS))
    peer.losses(1)
    _processes.reset_peak()
    peer.time_block(num_steps)
    return {"value": _processes.peak_bytes()}


def _print_start(rows: list[dict[str, Json]]) -> None:
    print("\nStart: seconds from fit() to the end of the first step, medians of the processes.\n")
    _print_pairs(rows, 1.0)


def _print_memory(rows: list[dict[str, Json]]) -> None:
    print("\nMemory: peak resident MiB during fit, medians of the processes.\n")
    _print_pairs(rows, _MEBIBYTE)


def _print_pairs(rows: list[dict[str, Json]], unit: float) -> None:
    _report.print_table(
        ["workload", "R", "against", "theirs", "distributary", "ratio", "bar", ""],
        [
            [
                row["workload"],
                row["replicas"],
                row["against"],
                row["theirs"] and row["theirs"] / unit,
                row["distributary"] and row["distributary"] / unit,
                row["ratio"],
                row["bar"],
                _report.verdict(row["ratio"], row["bar"]),
            ]
            for row in rows
        ],
    )


_PRINT = {
    "step": _print_step,
    "host": _print_host,
    "start": _print_start,
    "memory": _print_memory,
}


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "timed epochs per peer", 9, 2)
    parser.add_argument("--add", action="store_true", help="keep the other rows of the file")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of the default")
    parser.add_argument("--only", help=f"some of {','.join(_workloads.FIT_WORKLOADS)}")
    _command_line.add_replicas(parser)
    parser.add_argument("--peers", default=",".join(PEERS), help="some of the default, in order")
    parser.add_argument("--tensorflow-python", default=sys.executable, metavar="PATH")
    arguments = _command_line.parse(parser)
    for option, known in (("peers", PEERS), ("sections", SECTIONS)):
        names = [name.strip() for name in getattr(arguments, option).split(",")]
        if unknown := sorted(set(names) - set(known)):
            parser.error(f"--{option}: unknown {unknown}; there are {', '.join(known)}")
        setattr(arguments, option, names)
    if arguments.peers[0] != "handwritten":
        parser.error("--peers: the first one is the yardstick, handwritten")
    return arguments


if __name__ == "__main__":
    _command_line.run(_parse(), main, measure)
