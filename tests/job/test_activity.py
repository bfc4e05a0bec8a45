"""Scripts that hang are noticed, and slow ones are not blamed."""

import gc
import itertools
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distributary.job._activity import Activity

_CASES = Path(__file__).with_name("activity_cases.py")
_DEADLINE_SECONDS = 60.0
_BEAT_SECONDS = 0.03
# The module has to know what differs between versions of Python.
_PYTHONS = [
    sys.executable,
    *sorted(map(str, Path.home().glob(".pyenv/versions/3.13.*/bin/python"))),
]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only frames are known")


def _results(python, kind):
    output = subprocess.run(
        [python, str(_CASES), kind], capture_output=True, text=True, timeout=600
    )
    assert output.returncode == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()]


def _results_of_each_python(kind):
    """Returns results by Python; those run beside each other, as most cases wait."""
    with ThreadPoolExecutor() as pool:
        results = pool.map(_results, _PYTHONS, itertools.repeat(kind))
        return dict(zip(_PYTHONS, results, strict=True))


def test_hangs_are_noticed():
    for python, results in _results_of_each_python("hang").items():
        assert len(results) > 40, python
        assert [r for r in results if r.get("most", 0) < 12] == [], python
        for result in results:
            assert any(f" in {result['case']}" in line for line in result["where"]), result


def test_slow_work_is_not_blamed():
    for python, results in _results_of_each_python("slow").items():
        assert len(results) > 35, python
        # A beat without movement is in order. A job ends after many of them.
        assert [r for r in results if r.get("most", 9) > 3] == [], python


# In this process, beside JAX and its threads


@contextmanager
def _script(target, *args) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=target, args=args)
    thread.start()
    yield thread
    thread.join()


def _most_still_beats(activity: Activity, thread: threading.Thread) -> tuple[int, int]:
    """Beats while a thread works; returns the most beats in a row without movement, and all."""
    most = number = 0
    while thread.is_alive():
        still = activity.beat()
        if thread.is_alive():
            most, number = max(most, still), number + 1
        time.sleep(_BEAT_SECONDS)
    return most, number


def _compile() -> None:
    def unrolled(x):
        for i in range(150):
            x = jnp.tanh(x @ x) * (i + 1) + jnp.sort(x, axis=i % 2)
        return x

    jax.jit(unrolled).lower(jnp.ones((8, 8))).compile()


def _decompose() -> None:
    matrix = np.random.default_rng(0).normal(size=(1300, 1300))
    np.linalg.svd(matrix)


def _compute_in_jax() -> None:
    def step(_, x):
        return jnp.sin(x @ x)

    jax.jit(lambda x: jax.lax.fori_loop(0, 300, step, x))(jnp.ones((400, 400))).block_until_ready()


@pytest.mark.parametrize("work", [_compile, _decompose, _compute_in_jax])
def test_work_of_libraries_is_not_blamed(work):
    with _script(work) as thread:
        most, number = _most_still_beats(Activity(thread.ident), thread)

    assert number > 5
    assert most <= 3


def test_a_hang_is_noticed_beside_the_idle_threads_of_jax():
    jnp.ones(3).sum().block_until_ready()
    never = threading.Event()

    with _script(never.wait) as thread:
        activity = Activity(thread.ident, ignored=lambda: _others(thread))
        assert _is_noticed(activity)
        lines = activity.where()
        never.set()

    assert lines[-1].startswith("threading.py:")
    assert lines[-1].endswith("waiter.acquire()")


def _others(*counted: threading.Thread | int) -> set[int]:
    """The threads of whoever runs the tests, which may wait for another process."""
    idents = {one if isinstance(one, int) else one.ident for one in counted}
    return {ident for ident in sys._current_frames() if ident not in idents}


def _is_noticed(activity: Activity, num_beats: int = 10) -> bool:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if activity.beat() >= num_beats:
            return True
        time.sleep(_BEAT_SECONDS)
    return False


def test_threads_that_are_ignored_do_not_count():
    never = threading.Event()
    stop = threading.Event()

    def serve() -> None:
        number = 0
        while not stop.wait(0.01):
            number += 1

    with _script(serve) as service, _script(never.wait) as thread:
        assert not any(_beats(Activity(thread.ident)))
        others = _others(thread, service)
        assert _is_noticed(Activity(thread.ident, ignored=lambda: {*others, service.ident}))
        assert _is_noticed(Activity(thread.ident, ignored=lambda: {*others, service.native_id}))
        never.set()
        stop.set()


def _beats(activity: Activity) -> list[int]:
    counts = []
    for _ in range(10):
        counts.append(activity.beat())
        time.sleep(_BEAT_SECONDS)
    return counts


def test_processes_that_are_ignored_do_not_count():
    with subprocess.Popen(["sleep", "1000"]) as service:

        def poll() -> None:
            while not done:
                time.sleep(0.01)

        done: list[bool] = []
        with _script(poll) as thread:
            assert not any(_beats(Activity(thread.ident)))
            others = _others(thread)
            assert _is_noticed(Activity(thread.ident, ignored=lambda: {*others, service.pid}))
            done.append(True)
        service.kill()


def test_while_nobody_waits_nothing_is_remembered():
    never = threading.Event()

    with _script(never.wait) as thread:
        activity = Activity(thread.ident, ignored=lambda: _others(thread))
        assert _is_noticed(activity)
        assert activity.beat(closely=False) == 0
        assert activity.beat() == 0  # seen for the first time again
        never.set()


def test_nobody_is_blamed_when_no_script_runs():
    """So it is at an interactive prompt, where Python has no frame."""
    # The number of no thread; that of one that has ended may be used again.
    activity = Activity(1, ignored=_others)

    assert not any(_beats(activity))
    assert activity.where() == []


def test_the_variables_of_the_script_stay_as_they_are():
    held = threading.Event()
    never = threading.Event()
    found = {}

    def train() -> None:
        batch = _Batch()
        found["batch"] = weakref.ref(batch)
        held.set()
        never.wait()
        assert batch is not None
        del batch
        found["lives"] = found["batch"]() is not None
        found["dict"] = _options(1)

    def _options(size: int) -> dict[str, int]:
        options = locals()
        asked.set()
        answered.wait()
        later = 5
        assert later
        return dict(options)

    asked, answered = threading.Event(), threading.Event()
    with _script(train) as thread:
        held.wait()
        activity = Activity(thread.ident)
        _beats(activity)
        never.set()
        asked.wait()
        _beats(activity)
        answered.set()

    gc.collect()
    assert found["lives"] is False
    assert found["dict"] == {
        "size": 1,
        "asked": asked,
        "answered": answered,
    }


class _Batch:
    pass


def test_the_report_shows_the_script_and_its_other_threads():
    lock = threading.Lock()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            never.wait()

    def take() -> None:
        held.wait()
        json.loads("1", parse_int=take_lock)

    def take_lock(_: str) -> None:
        with lock:
            pass

    never = threading.Event()
    with _script(hold) as holder, _script(take) as thread:
        activity = Activity(thread.ident, ignored=lambda: _others(thread, holder))
        assert _is_noticed(activity)
        lines = activity.where()
        short = activity.where(max_frames=1)
        never.set()

    where = "test_the_report_shows_the_script_and_its_other_threads.<locals>"
    assert [line.partition(" in ")[2] for line in lines] == [
        f'{where}.take: json.loads("1", parse_int=take_lock)',
        f"{where}.take_lock: with lock:",
        f"{where}.hold: never.wait()",
    ]
    assert lines[0].startswith("test_activity.py:")
    assert lines[-1].startswith(f"thread {holder.name}: test_activity.py:")
    assert short == lines[1:]


def test_without_a_view_of_the_system_only_certain_hangs_are_noticed():
    never = threading.Event()
    done: list[bool] = []

    def turn() -> None:
        while not done:
            pass

    def wait_long() -> None:
        never.wait(1000)

    for hang, is_noticed in ((never.wait, True), (turn, True), (wait_long, False)):
        with _script(hang) as thread:
            others = _others(thread)
            activity = Activity(thread.ident, ignored=lambda others=others: others)
            activity._can_look = False
            assert (_is_noticed if is_noticed else lambda a: any(_beats(a)))(activity) == is_noticed
            never.set()
            done.append(True)
        never.clear()
        done.clear()
