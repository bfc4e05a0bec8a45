"""Do models that others wrote train as they do on one device?

Every model is trained for three steps, the last of them uneven, by Keras alone on one device, and
under each setting with the same initial weights and global batches. Then it is evaluated, predicts,
is saved and is loaded. Weights are random and nothing is downloaded. The models come from packages
that are installed so:

    pip install '.[models]'
    pip install --no-deps keras-hub medicai

(keras-hub depends on TensorFlow, and medicai on readers of files, which are not needed here.) Then

    python tests/models/run.py --shard 1/4
    python tests/models/run.py --only Mixtral --settings "2 replicas"
    python tests/models/run.py --page docs/guide/models.md

A row that differs by more than one device does from itself, or that fails, lets the program end
with 1. Rows are added to `results.jsonl`, of which `--page` writes the table.
"""

import argparse
import contextlib
import json
import logging
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
# Nearly all of the time goes into compiling programs that run once, and less of it with these.
# (With level 0, maxima can be wrong.)
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false " * version("jaxlib").startswith("0.10.")
    + "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=1",
)

import numpy as np
from _case import BATCH, ROWS, Case, Loop, data_of

_RESULTS = Path(__file__).with_name("results.jsonl")
_LOSS_TOLERANCE = 1e-5
_WEIGHT_TOLERANCE = 1e-4
_SECONDS = 1200  # of one model in one setting


class Setting(NamedTuple):
    """A way to run.

    Attributes:
        strategy: Returns the strategy; None for Keras alone.
        devices: Number of CPU devices of each process.
        workers: Number of processes.
        dtype: Of weights and of what is computed.
    """

    strategy: Callable[[], Any] | None
    devices: int = 2
    workers: int = 1
    dtype: str = "float32"

    @property
    def in_float64(self) -> "Setting":
        """The same in float64, where rounding is small."""
        return self._replace(dtype="float64")


def _of(name: str, *args: Any, **options: Any) -> Any:
    import distributary as dist

    return getattr(dist, name)(*args, **options)


def _mirrored(num_replicas: int, **options: Any) -> Any:
    return _of("MirroredStrategy", [f"CPU:{i}" for i in range(num_replicas)], **options)


def _servers() -> Any:
    import distributary as dist

    cluster = dist.experimental.local_cluster(workers=1, ps=2)
    return dist.experimental.ParameterServerStrategy(cluster)


_ALONE = Setting(None, devices=1)
SETTINGS = {
    "2 replicas": Setting(lambda: _mirrored(2)),
    "4 replicas": Setting(lambda: _mirrored(4), devices=4),
    "sharded state": Setting(lambda: _mirrored(2, experimental_shard_optimizer_state=True)),
    "layers over 2 devices": Setting(lambda: _mirrored(2, experimental_model_parallel=2)),
    "layers over 2 of 4 devices, parts over replicas": Setting(
        lambda: _mirrored(4, experimental_model_parallel=2, experimental_shard_parameters=True),
        devices=4,
    ),
    "sharded parameters": Setting(lambda: _mirrored(2, experimental_shard_parameters=True)),
    "sharded parameters, 4 replicas": Setting(
        lambda: _mirrored(4, experimental_shard_parameters=True), devices=4
    ),
    "sharded parameters, 2 workers": Setting(
        lambda: _of("MultiWorkerMirroredStrategy", experimental_shard_parameters=True), workers=2
    ),
    "central storage": Setting(lambda: _of("CentralStorageStrategy", ["CPU:0", "CPU:1"])),
    "2 workers": Setting(lambda: _of("MultiWorkerMirroredStrategy"), devices=1, workers=2),
    "servers": Setting(_servers, devices=1),
}


# One run of one model: in a process of its own


class Outcome(NamedTuple):
    """What a run found.

    Attributes:
        share: Bytes of all variables, those of the optimizer included, on the first device, as a
            part of the bytes of the whole variables.
    """

    x: Any
    y: Any
    initial: list[np.ndarray]
    loss: float
    weights: list[np.ndarray]
    evaluated: float
    predicted: list[np.ndarray]
    loaded: bool
    messages: list[str]
    share: float = 1.0


@contextlib.contextmanager
def _messages() -> Iterator[list[str]]:
    """Collects what a user sees: warnings, and what distributary logs as a warning."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distributary").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if "Distributary" in w.category.__name__]


def _run_model(case: Case, setting: Setting, given: Outcome | None) -> Outcome:
    import keras

    strategy = setting.strategy() if setting.strategy is not None else None
    if strategy is not None and setting.workers > 1:
        assert strategy.num_replicas_in_sync == setting.workers * setting.devices
    scope = contextlib.nullcontext() if strategy is None else strategy.scope()
    keras.utils.set_random_seed(0)
    with _messages() as messages:
        with scope:
            model = case.build()
            x = data_of(model, case) if given is None else given.x
            y = _targets(model, case, x) if given is None else given.y
            optimizer = (case.optimizer or (lambda: keras.optimizers.SGD(0.01, momentum=0.9)))()
            options = {"loss": _loss(model, case), **case.compile}
            model.compile(optimizer=optimizer, **options)
            if given is not None:
                model.set_weights(given.initial)
            initial = [np.array(value) for value in model.get_weights()]
        own = dict(y=y) if not case.own_loss else {}
        history = model.fit(x, **own, batch_size=case.batch, shuffle=False, verbose=0)
        weights = [np.array(value) for value in model.get_weights()]
        # Of even batches: each part of an uneven one is compiled again.
        even = keras.tree.map_structure(lambda array: array[: 2 * BATCH], (x, own))
        evaluated = model.evaluate(even[0], **even[1], batch_size=2 * BATCH, verbose=0)
        predicted = model.predict(even[0], batch_size=2 * BATCH, verbose=0)
        leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(predicted)]
        if case.after is not None:
            leaves += [np.asarray(leaf) for leaf in keras.tree.flatten(case.after(model))]
        loaded = _is_loaded(model, weights, strategy)
    return Outcome(
        x=x,
        y=y,
        initial=initial,
        loss=float(history.history["loss"][0]),
        weights=weights,
        evaluated=float(np.ravel(evaluated)[0]),
        predicted=leaves,
        loaded=loaded,
        messages=messages,
        # Alone, everything is on one device, and Keras leaves deleted arrays behind.
        share=1.0 if strategy is None else _share(model),
    )


def _share(model: Any) -> float:
    variables = [*model.variables, *model.optimizer.variables]
    stored = whole = 0
    for variable in variables:
        array = variable._value
        if hasattr(array, "addressable_shards"):
            stored += array.addressable_shards[0].data.nbytes
            whole += int(np.prod(variable.shape)) * array.dtype.itemsize
    return stored / max(whole, 1)


def _targets(model: Any, case: Case, x: Any) -> Any:
    import keras

    random = np.random.default_rng(1)
    if case.own_loss:
        return None
    if case.classes:
        return random.integers(0, case.classes, ROWS)
    even = keras.tree.map_structure(lambda array: array[: 2 * BATCH], x)
    outputs = model.predict(even, batch_size=2 * BATCH, verbose=0)
    if case.loss == "tokens":
        return random.integers(0, outputs.shape[-1], (ROWS, *outputs.shape[1:-1]))
    return keras.tree.map_structure(
        lambda out: random.normal(size=(ROWS, *out.shape[1:])).astype(np.float32), outputs
    )


def _loss(model: Any, case: Case) -> Any:
    import keras

    if case.own_loss:
        return None
    if case.classes and case.loss == "mse":
        return "sparse_categorical_crossentropy"
    outputs = getattr(model, "output", None)
    return keras.tree.map_structure(lambda _: case.loss, outputs)


def _is_loaded(model: Any, weights: list[np.ndarray], strategy: Any) -> bool:
    """Saves the model and loads it; returns whether that works and gives the same weights."""
    import keras

    if strategy is not None and strategy.extended.num_workers > 1:
        folder = os.environ["SHARED_FOLDER"]
    else:
        folder = tempfile.mkdtemp(dir=os.environ["SHARED_FOLDER"])
    path = os.path.join(folder, "model.keras")
    try:
        model.save(path)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            other = keras.models.load_model(path, compile=False, safe_mode=False)
    except Exception:  # some models have a configuration that Keras itself cannot save or load
        traceback.print_exc()
        return False
    own = other.get_weights()
    return len(own) == len(weights) and all(map(np.array_equal, own, weights))


def _run_loop(case: Loop, setting: Setting, given: Outcome | None) -> Outcome:
    """Runs a loop as docs/guide/custom-loops.md writes it; alone, with JAX and optax only."""
    import jax
    import jax.numpy as jnp
    import optax

    strategy = setting.strategy() if setting.strategy is not None else None
    random = np.random.default_rng(0)
    x, y = (case.x(random), case.y(random)) if given is None else (given.x, given.y)
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]
    initial = case.initial()
    leaves, tree = jax.tree.flatten(initial)
    if given is not None:
        initial = jax.tree.unflatten(tree, given.initial)
    optimizer = case.optimizer()
    losses: list[float] = []
    if strategy is None:

        @jax.jit
        def alone(parameters: Any, state: Any, x: Any, y: Any) -> Any:
            loss, gradients = jax.value_and_grad(
                lambda parameters: case.loss(parameters, x, y) / len(x)
            )(parameters)
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state, loss

        parameters, state = initial, optimizer.init(initial)
        for x_, y_ in batches:
            parameters, state, loss = alone(parameters, state, x_, y_)
            losses.append(float(loss))
        evaluated = float(jax.jit(case.loss)(parameters, x, y)) / ROWS
        found = jax.tree.leaves((parameters, state))
        return Outcome(
            x, y, [np.array(v) for v in leaves], float(np.mean(losses)),
            [np.asarray(v) for v in found], evaluated, [], True, [],
        )  # fmt: skip
    import distributary as dist

    with _messages() as messages:
        with strategy.scope():
            parameters = jax.tree.map(dist.Variable, initial)
            state = jax.tree.map(dist.Variable, optimizer.init(initial))

        def values(variables: Any) -> Any:
            return jax.tree.map(lambda variable: variable.value(), variables)

        def step(x: Any, y: Any) -> Any:
            def loss(x: Any, y: Any) -> Any:
                return case.loss(values(parameters), x, y)

            value, gradients = dist.value_and_grad(loss, parameters)(x, y)
            value, gradients, count = dist.get_replica_context().all_reduce(
                "SUM", (value, gradients, jnp.float32(len(x)))
            )
            gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
            before = values(parameters)
            updates, new = optimizer.update(gradients, values(state), before)
            after = optax.apply_updates(before, updates)
            jax.tree.map(lambda v, value: v.assign(value), (parameters, state), (after, new))
            return value / count

        def evaluate(x: Any, y: Any) -> Any:
            return case.loss(values(parameters), x, y)

        for batch in strategy.experimental_distribute_dataset(batches):
            losses.append(float(strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None)))
        (batch,) = strategy.experimental_distribute_dataset([(x, y)])
        total = strategy.reduce("SUM", strategy.run(evaluate, args=batch), axis=None)
        found = [np.asarray(v.numpy()) for v in jax.tree.leaves((parameters, state))]
        folder = os.environ["SHARED_FOLDER"]
        checkpoint = dist.checkpoint.Checkpoint(parameters=parameters, state=state)
        path = checkpoint.save(os.path.join(folder, "loop"))
        for variable in jax.tree.leaves((parameters, state)):
            variable.assign(jnp.zeros_like(variable.value()))
        checkpoint.restore(path)
        again = [np.asarray(v.numpy()) for v in jax.tree.leaves((parameters, state))]
    return Outcome(
        x, y, given.initial, float(np.mean(losses)), found, float(total) / ROWS, [],
        all(map(np.array_equal, again, found)), messages,
    )  # fmt: skip


# Processes


def _in_processes(
    case: Case | Loop, setting: Setting, given: Outcome | None, folder: str
) -> Outcome | str:
    """Runs a model in a fork for each worker; returns what the first found, or an error."""
    addresses = _addresses(setting.workers) if setting.workers > 1 else []
    paths, children = [], []
    for worker in range(setting.workers):
        path = os.path.join(folder, f"outcome-{worker}")
        Path(path).unlink(missing_ok=True)
        paths.append(path)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            if addresses:
                task = {"type": "worker", "index": worker}
                os.environ["TF_CONFIG"] = json.dumps(
                    {"cluster": {"worker": addresses}, "task": task}
                )
            _child(case, setting, given, folder, path)
        children.append(child)
    deadline = time.monotonic() + _SECONDS
    while children and time.monotonic() < deadline:
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if children:
        return f"did not end within {_SECONDS} s"
    outcomes = []
    for path in paths:
        if not os.path.exists(path):
            return "the process died"
        with open(path, "rb") as file:
            outcomes.append(pickle.load(file))
    failed = next((found for found in outcomes if isinstance(found, str)), None)
    return outcomes[0] if failed is None else failed


def _addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def _child(
    case: Case | Loop, setting: Setting, given: Outcome | None, folder: str, path: str
) -> None:
    """Runs a model, writes what it finds to `path`, and ends the process."""
    log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["SHARED_FOLDER"] = folder
    found: Outcome | str
    try:
        if setting.strategy is not None:
            import distributary as dist

            dist.config.set_logical_cpu_devices(setting.devices)
        if setting.dtype == "float64":
            import jax
            import keras
            from keras.src.backend.common.dtypes import BIT64_TO_BIT32_DTYPE

            jax.config.update("jax_enable_x64", True)
            keras.config.set_floatx(setting.dtype)
            # Else, Keras computes means, normalizations and more in float32.
            BIT64_TO_BIT32_DTYPE[setting.dtype] = setting.dtype
        run = _run_model if isinstance(case, Case) else _run_loop
        found = run(case, setting, given)  # type: ignore[operator]
    except BaseException as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    if isinstance(found, Outcome) and given is not None:
        found = found._replace(x=None, y=None, initial=[])
    with open(path + "~", "wb") as file:
        pickle.dump(found, file)
    os.rename(path + "~", path)
    if setting.workers > 1:
        import jax

        jax.distributed.shutdown()  # waits for the other worker, which may still read
    sys.stderr.flush()
    os._exit(0)


# Rows


def _difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Returns the largest difference, relative for values above 1; infinite if NaN or missing."""
    if len(found) != len(expected):
        return float("inf")
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return float("inf")
        if one.dtype.kind in "USO" or one.size == 0:
            continue
        one, other = one.astype(np.float64), other.astype(np.float64)
        apart = np.max(np.abs(one - other) / np.maximum(1, np.abs(other)))
        largest = max(largest, float(apart) if np.isfinite(apart) else float("inf"))
    return largest


def _row(case: Case | Loop, name: str, found: Outcome | str, expected: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"model": case.name, "package": case.package, "setting": name}
    if isinstance(found, str):
        result = "refused" if found.startswith("UnsupportedError") else "fails"
        return {**row, "result": result, "reason": found[:600]}
    apart = {
        "loss": _difference([np.array(found.loss)], [np.array(expected.loss)]),
        "weights": _difference(found.weights, expected.weights),
        "evaluate": _difference([np.array(found.evaluated)], [np.array(expected.evaluated)]),
        "predict": _difference(found.predicted, expected.predicted),
    }
    within = (
        max(apart["loss"], apart["evaluate"]) <= _LOSS_TOLERANCE
        and max(apart["weights"], apart["predict"]) <= _WEIGHT_TOLERANCE
    )
    result, reason = "equal" if within else "differs", ""
    if found.share < 1:
        row["share"] = round(found.share, 3)
    if expected.loaded and not found.loaded:
        result, reason = "fails", "another model is loaded than was saved"
    return {
        **row,
        **{name: float(f"{value:.2g}") for name, value in apart.items()},
        "result": result,
        "reason": reason,
        "messages": sorted({message[:300] for message in found.messages}),
    }


def _in_float64(
    case: Case | Loop, name: str, expected: Outcome | str, given: Outcome, folder: str
) -> dict[str, Any]:
    """Returns the result if a run that differs is equal in float64."""
    if isinstance(expected, str):
        return {}
    found = _in_processes(case, SETTINGS[name].in_float64, given, folder)
    row = _row(case, name, found, expected)
    if row["result"] != "equal":
        return {}
    return {
        "result": "equal in float64",
        "reason": f"amplifies rounding: in float64, loss differs by {row['loss']:.0e}, weights by"
        f" {row['weights']:.0e}",
    }


def _one_device_again(case: Case | Loop, expected: Outcome, folder: str) -> Outcome | str:
    """Runs a model on one device, its weights beginning with another last bit."""
    random = np.random.default_rng(0)  # some up, some down: normalizations undo a common factor
    initial = [
        np.nextafter(value, np.inf * random.choice([-1, 1], value.shape).astype(np.float32))
        if value.dtype == np.float32
        else value
        for value in expected.initial
    ]
    return _in_processes(case, _ALONE, expected._replace(initial=initial), folder)


def _as_one_device(
    case: Case | Loop, row: dict[str, Any], expected: Outcome, again: Outcome | str
) -> dict[str, str]:
    """Returns the result if one device differs from itself as much as a run does."""
    control = _row(case, "one device", again, expected)
    limits = dict.fromkeys(("loss", "evaluate"), _LOSS_TOLERANCE)
    limits |= dict.fromkeys(("weights", "predict"), _WEIGHT_TOLERANCE)
    beyond = [name for name, limit in limits.items() if row.get(name, 0) > limit]
    if control["result"] == "fails" or any(row[name] > 10 * control[name] for name in beyond):
        return {}
    apart = ", ".join(f"{name} {control[name]:.0e}" for name in beyond)
    return {
        "result": "differs, as one device",
        "reason": f"amplifies rounding: one device differs by {apart} after a change of its"
        " weights in the last bit",
    }


def _rows_of(case: Case | Loop, names: list[str]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        amplifies = isinstance(case, Case) and case.amplifies
        alone = _ALONE.in_float64 if amplifies else _ALONE
        expected = _in_processes(case, alone, None, folder)
        seconds = round(time.monotonic() - began, 1)
        if isinstance(expected, Outcome) and not np.isfinite(expected.loss):
            expected = f"the loss is {expected.loss} on one device"
        if isinstance(expected, str):
            yield {
                "model": case.name,
                "package": case.package,
                "setting": "one device",
                "result": "fails",
                "reason": expected[:600],
            }
            return
        precise: Outcome | str | None = None
        again: Outcome | str | None = None
        for name in names:
            if isinstance(case, Loop) and name == "servers":
                continue
            began = time.monotonic()
            setting = SETTINGS[name].in_float64 if amplifies else SETTINGS[name]
            found = _in_processes(case, setting, expected, folder)
            row = _row(case, name, found, expected)
            if amplifies and row["result"] == "equal":
                row |= {"result": "equal in float64", "reason": "amplifies rounding"}
            elif row["result"] == "differs" and not amplifies:
                if precise is None:
                    precise = _in_processes(case, _ALONE.in_float64, expected, folder)
                told = _in_float64(case, name, precise, expected, folder)
                if not told:
                    again = again or _one_device_again(case, expected, folder)
                    told = _as_one_device(case, row, expected, again)
                row |= told
            yield {**row, "seconds": round(time.monotonic() - began, 1), "alone": seconds}


def main() -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shard", default="1/1", metavar="K/N", help="each N-th model, from the K-th"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="models of these names")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="instead of all")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="file that gets the rows")
    parser.add_argument("--page", type=Path, help="writes the table of the results instead")
    parser.add_argument("--list", action="store_true", help="prints the names of the models")
    arguments = parser.parse_args()
    if arguments.page:
        from _page import write

        return write(arguments.page, arguments.results)
    import _keras_hub
    import _loops
    import _others

    cases = [*_keras_hub.cases(), *_others.cases(), *_loops.cases()]  # in the order of the page
    part, parts = map(int, arguments.shard.split("/"))
    models = [case for case in cases if re.search(arguments.only, case.name)]
    if not models:
        parser.error(f"--only {arguments.only} matches no model; --list prints their names")
    names = [case.name for case in models]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    bad = 0
    for case in models[part - 1 :: parts]:
        if arguments.list:
            print(f"{case.package}: {case.name}")
            continue
        for row in _rows_of(case, arguments.settings or list(SETTINGS)):
            bad += row["result"] in ("differs", "fails")
            with open(arguments.results, "a") as file:
                file.write(json.dumps(row) + "\n")
            shown = {key: row.get(key) for key in ("loss", "weights", "evaluate", "predict")}
            print(
                f"{row['model']}, {row['setting']}: {row['result']}, {shown},"
                f" {row.get('seconds', 0)} s, {row['reason'][:300]}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
