"""How long is a step of two workers, next to the same step at the commit before?

Two jobs of two processes with one device each work in turns, blocks of steps of one and then of the
other: one imports distributary from this tree, the other from a checkout of another commit.

    git worktree add /tmp/before HEAD~1
    python benchmarks/commit_before.py /tmp/before

`control` is the job before a second time: what the ratio of two equal jobs looks like.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_BATCH_SIZE, _NUM_FEATURES, _NUM_CLASSES = 32, 784, 10
_BLOCK_SECONDS = 0.4


class _Job:
    """Two workers that run blocks of steps on demand."""

    def __init__(self, source: Path) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
        for one in sockets:
            one.close()
        self._workers = []
        for worker in range(2):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
            environ = {**os.environ, "TF_CONFIG": json.dumps(task), "PYTHONPATH": str(source)}
            environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
            environ |= {"KERAS_BACKEND": "jax", "PYTHONUNBUFFERED": "1"}
            self._workers.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--worker"],
                    env=environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )

    def seconds(self, what: str, num_steps: int) -> float:
        """Seconds per step of a block."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{what} {num_steps}\n")
            worker.stdin.flush()
        found = []
        for worker in self._workers:
            assert worker.stdout is not None
            while not (line := worker.stdout.readline()).startswith("seconds "):
                if not line:
                    raise RuntimeError(f"a worker has ended in {what}")
            found.append(float(line.split()[1]))
        return max(found) / num_steps

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.kill()
            worker.communicate()


def _work() -> None:
    """What a worker does: blocks, as its input says."""
    import jax.numpy as jnp
    import keras
    import numpy as np

    import distributary as dist

    strategy = dist.MultiWorkerMirroredStrategy()
    generator = np.random.default_rng(0)
    x = generator.normal(size=(_BATCH_SIZE * 64, _NUM_FEATURES)).astype(np.float32)
    y = generator.integers(0, _NUM_CLASSES, len(x))

    def new_model() -> Any:
        model = keras.Sequential(
            [
                keras.Input((_NUM_FEATURES,)),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(_NUM_CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        return model

    with strategy.scope():
        model, of_loop = new_model(), new_model()
        optimizer = keras.optimizers.Adam()
        optimizer.build(of_loop.trainable_variables)

    def step(images: Any, labels: Any) -> Any:
        with dist.GradientTape() as tape:
            logits = of_loop(images, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = jnp.sum(losses) / _BATCH_SIZE
        gradients = tape.gradient(loss, of_loop.trainable_variables)
        optimizer.apply_gradients(zip(gradients, of_loop.trainable_variables, strict=True))
        return loss

    rows = x[:_BATCH_SIZE], y[:_BATCH_SIZE]
    dataset = dist.data.Dataset.from_tensor_slices(rows).batch(_BATCH_SIZE)
    images, labels = next(iter(strategy.experimental_distribute_dataset(dataset)))
    for line in sys.stdin:
        what, number = line.split()
        num_steps = int(number)
        begin = time.perf_counter()
        if what == "run":
            for _ in range(num_steps):
                loss = strategy.run(step, args=(images, labels))
            float(strategy.experimental_local_results(loss)[0])
        else:
            model.fit(x, y, batch_size=_BATCH_SIZE, epochs=num_steps // 64, verbose=0)
        print(f"seconds {time.perf_counter() - begin}", flush=True)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, nargs="?", help="checkout of the other commit")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work()
        return 0
    before, after = arguments.before / "src", Path(__file__).parents[1] / "src"
    jobs = {"before": _Job(before), "after": _Job(after), "control": _Job(before)}
    try:
        for what in ("run", "fit"):
            seconds: dict[str, list[float]] = {name: [] for name in jobs}
            for job in jobs.values():
                job.seconds(what, 64)
            num_steps = 64 * max(1, round(_BLOCK_SECONDS / jobs["before"].seconds(what, 64) / 64))
            for number in range(arguments.rounds):
                order = list(jobs)
                order = order[number % 3 :] + order[: number % 3]
                for name in order:
                    seconds[name].append(jobs[name].seconds(what, num_steps))
            for name in ("after", "control"):
                ratios = [a / b for a, b in zip(seconds[name], seconds["before"], strict=True)]
                first, median, third = statistics.quantiles(ratios, n=4)
                milliseconds = 1e3 * statistics.median(seconds[name])
                print(
                    f"{what:4} {name:8} {milliseconds:.3f} ms, over before {median:.3f}"
                    f" ({first:.3f} to {third:.3f})"
                )
    finally:
        for job in jobs.values():
            job.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
