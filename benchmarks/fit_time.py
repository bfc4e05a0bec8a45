"""How long is a step of Keras' `model.fit` under a strategy, next to everything it competes with?

Four sections, see `--sections`:

    step    Time per step of an epoch of `fit` on NumPy arrays in memory, without callbacks. Every
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
    memory  Peak resident memory while `fit` runs, compilation excluded, in fresh processes.

    python benchmarks/fit_time.py --tensorflow-python /path/with/tensorflow/bin/python
    python benchmarks/fit_time.py --quick --sections step --only mlp32 --replicas 1,2
"""

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import _harness
from _harness import MEBIBYTE, NEXT_TO, Pair, Request, Row, number, pair
from _peers import Job, Peer, command, timed
from _workloads import FIT_WORKLOADS, WORKLOADS

SECTIONS = ("step", "host", "start", "memory")
PEERS = (
    *("handwritten", "distributary", "control", "handwritten_keras"),
    *("keras", "data_parallel", "tensorflow"),
)

EPOCHS = {"mlp32": 960, "mlp256": 320, "transformer32": 24, "cnn64": 64}
"""Steps of an epoch."""

FUSED = "_16"
FUSED_WORKLOADS = ("mlp32", "cnn64")
"""Where distributary and Keras are also measured with 16 steps per execution."""

LAYERED_WORKLOADS = ("transformer32",)
"""Where layers cost more than the hand-written formulas, so that the loop is measured with both."""

_ONE_OR_TWO, _ALL = (1, 2), (1, 2, 4)
BARS: dict[tuple[str, str, str], tuple[tuple[int, ...], float]] = {
    ("mlp32", "distributary", "handwritten"): (_ONE_OR_TWO, 1.15),
    ("mlp32", "distributary", "tensorflow"): ((2,), 1 / 8),
    ("mlp32", "distributary", "data_parallel"): ((2,), 1.0),
    ("mlp32", "distributary_16", "handwritten"): (_ONE_OR_TWO, 1 / 1.2),
    ("mlp32", "distributary_16", "keras_16"): ((1,), 1 / 2),
    ("mlp32", "distributary_16", "data_parallel_16"): ((2,), 1 / 2),
    ("cnn64", "distributary_16", "distributary"): (_ONE_OR_TWO, 1.0),
    ("mlp256", "distributary", "handwritten"): (_ALL, 1.10),
    ("transformer32", "distributary", "handwritten"): (_ALL, 1.10),
    ("transformer32", "distributary", "handwritten_keras"): (_ALL, 1.05),
    ("cnn64", "distributary", "handwritten"): ((2,), 1.05),
    ("cnn64", "distributary", "tensorflow"): ((2,), 1.0),
    ("cnn64", "distributary", "data_parallel"): ((2,), 1.0),
    **{(name, "distributary", "keras"): ((1,), 1.0) for name in FIT_WORKLOADS},
}
"""Numbers of replicas for which `ours / theirs` of a workload's time per step has a bar, and it."""

HOST_BAR_MICROSECONDS = 120.0
START_BAR = 1.2
MEMORY_BAR = 1.05


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields every section; of start and memory a process for every peer of every round."""
    for section in arguments.sections:
        if section == "host":
            for way in ("distributary", "keras"):
                yield {"section": section, "way": way, "replicas": 1}
            continue
        for workload in ("mlp32",) if section == "start" else arguments.only:
            for count in arguments.replicas:
                common = {"section": section, "workload": workload, "replicas": count}
                if section == "step":
                    yield common
                elif section == "memory" or count <= 2:
                    for _ in range(1 if arguments.quick else 5):
                        for way in ("distributary", "keras" if count == 1 else "data_parallel"):
                            yield {**common, "way": way}


def measure(request: Request) -> list[Row]:
    """Measures one section of a workload, or one peer of it."""
    sections = {
        "step": measure_step,
        "host": _measure_host,
        "start": _measure_start,
        "memory": _measure_memory,
    }
    return [sections[request["section"]](request)]


# Time per step


def measure_step(request: Request) -> Row:
    """Measures the peers of a workload in turns; with `bar`, that one for distributary."""
    workload, num_replicas = request["workload"], request["replicas"]
    names = list(_names(workload, num_replicas, request["peers"], request["others"]))
    num_steps = EPOCHS[workload] // (4 if request["quick"] else 1)
    peers = [_start(name, request, num_steps) for name in names]
    return _harness.compare(
        request, f"`fit`, {workload}", peers, list(_pairs(workload, num_replicas, names))
    )


def _names(
    workload: str, num_replicas: int, wanted: Sequence[str], others: Sequence[str]
) -> Iterator[str]:
    """Yields the peers of one row, in the order of the first round."""
    absent = {"data_parallel" if num_replicas == 1 else "keras"}
    if workload not in LAYERED_WORKLOADS:
        absent.add("handwritten_keras")
    if "tensorflow" not in others:
        absent.add("tensorflow")
    for name in wanted:
        if name not in absent:
            yield name
            if workload in FUSED_WORKLOADS and name in ("distributary", "keras", "data_parallel"):
                yield name + FUSED


def _start(name: str, request: Request, num_steps: int) -> Peer:
    way = name.removesuffix(FUSED)
    environ = _harness.environment(request["replicas"], request["platform"])
    common = {
        "workload": request["workload"],
        "num_replicas": request["replicas"],
        "num_steps": num_steps,
    }
    if way in ("handwritten", "control", "handwritten_keras"):
        model = "keras" if way == "handwritten_keras" else "jax"
        served = command("_handwritten", model=model, **common)
    else:
        python = sys.executable
        if way == "tensorflow":
            python, environ = request["tensorflow_python"], _harness.foreign_environment()
        fused = 1 if way == name else int(FUSED.removeprefix("_"))
        served = command("_keras", python, way=way, steps_per_execution=fused, **common)
    job = Job(name, [served], [environ])
    return job.peer(name, num_checked=2, num_steps=num_steps, group="fit")


def _pairs(workload: str, num_replicas: int, names: Sequence[str]) -> Iterator[Pair]:
    """Yields what is alike, or has a bar."""
    for ours in ("distributary", "distributary" + FUSED):
        for theirs in names:
            replicas, limit = BARS.get((workload, ours, theirs), ((), None))
            bar = limit if num_replicas in replicas else None
            is_alike = ours.endswith(FUSED) == theirs.endswith(FUSED)
            if bar is not None or (is_alike and theirs.removesuffix(FUSED) in NEXT_TO):
                fused = ", 16 steps per execution" if ours.endswith(FUSED) else ""
                layers = " around the Keras model" if theirs == "handwritten_keras" else ""
                yield pair(ours, theirs, bar, f"`fit`{fused}, {workload}{layers}")


# Time of the host


def _measure_host(request: Request) -> Row:
    import jax
    import jax.numpy as jnp
    import keras
    import numpy as np
    from _keras import WAYS
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    batch_size, num_steps = 8, 500 if request["quick"] else 2000
    rng = np.random.default_rng(0)
    x = rng.random((num_steps * batch_size, 4)).astype(np.float32)
    y = rng.random((num_steps * batch_size, 1)).astype(np.float32)
    with WAYS[request["way"]](1):
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse")

    def fit(_: int) -> None:
        model.fit(x, y, batch_size=batch_size, verbose=0)

    fit(num_steps)
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

    def bare(_: int) -> None:
        call(ArrayDataAdapter(x, y, batch_size=batch_size, shuffle=True).get_jax_iterator())

    def bare_numpy(_: int) -> None:
        indices = np.random.permutation(len(x)).reshape(num_steps, batch_size)
        call((x[chosen], y[chosen]) for chosen in indices)

    peers = [timed("fit", fit), timed("bare", bare), timed("bare_numpy", bare_numpy)]
    seconds = _harness.interleave(peers, 2 * request["rounds"], num_steps)
    rounds = {name: [1e6 * value for value in values] for name, values in seconds.items()}
    overhead = min(rounds["fit"]) - min(rounds["bare"])
    bar = HOST_BAR_MICROSECONDS if request["way"] == "distributary" else None
    numbers = [number("`fit` less the bare loop, of the fastest rounds", overhead, "µs", bar)]
    return _harness.row(f"host, {request['way']}", 1, "µs/step", rounds, numbers=numbers)


# Against Keras, in fresh processes


def _measure_start(request: Request) -> Row:
    """Measures from the call of `fit` until the loss of its first step is on the host."""
    import keras
    from _keras import build_model

    workload = WORKLOADS[request["workload"]]
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
    what = "until the first step of `fit`"
    return _one_round(request, what, "s", ended[0] - start, START_BAR)


def _measure_memory(request: Request) -> Row:
    """Measures the peak while `fit` runs; of the whole life where Linux cannot reset it."""
    import _keras

    workload = WORKLOADS[request["workload"]]
    num_steps = EPOCHS[workload.name] // 4
    model = _keras.build_model(request["way"], workload, request["replicas"])
    peer = _keras.fit(request["way"], model, workload, num_steps)
    peer.losses(1)
    _harness.reset_peak()
    peer.time_block(num_steps)
    mebibytes = _harness.peak_bytes() / MEBIBYTE
    return _one_round(request, "resident memory in `fit`", "MiB", mebibytes, MEMORY_BAR)


def _one_round(request: Request, what: str, unit: str, value: float, bar: float) -> Row:
    pairs = [pair("distributary", theirs, bar) for theirs in ("keras", "data_parallel")]
    name = f"{what}, {request['workload']}"
    return _harness.row(name, request["replicas"], unit, {request["way"]: [value]}, pairs)


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(9, 2),
        options={
            "--sections": {"choices": SECTIONS},
            "--only": {"choices": FIT_WORKLOADS},
            "--replicas": {"choices": (1, 2, 4)},
            "--peers": {"choices": PEERS, "help": "the first is the yardstick"},
            "--tensorflow-python": {"default": sys.executable, "metavar": "PATH"},
        },
    )
