"""Lines of the workers arrive whole, in order and with their prefix."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from distributary.devices import progress
from distributary.launch import report


def test_lines_of_many_writers_are_not_torn(launch):
    script = """
for i in range(300):
    for part in (name, " ", str(i), " ", "x" * 997, "\\n"):
        os.write(1, part.encode())
"""
    result = launch(script, num_workers=3)

    lines = result.stdout.splitlines()
    for worker in range(3):
        own = [line for line in lines if line.startswith(f"[worker {worker}] ")]
        x = "x" * 997
        assert own == [f"[worker {worker}] worker{worker} {i} {x}" for i in range(300)]
    assert len(lines) == 900


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("os.write(1, b'x' * 50000); os.kill(os.getpid(), signal.SIGKILL)", [b"x" * 50_000]),
        ("print('x' * 5_000_000)", [b"x" * 5_000_000]),
        (
            "os.write(1, b'10%\\r20%\\r30%\\nwindows\\r\\nend\\r')",
            [b"10%", b"20%", b"30%", b"windows", b"end"],
        ),
        ("os.write(1, bytes(range(128, 256)))", [bytes(range(128, 256))]),
    ],
    ids=["of a killed worker", "huge", "redraws of a progress bar", "no text"],
)
def test_lines_arrive_whole(text, lines, launch, tmp_path):
    launch(text)

    assert (tmp_path / "stdout").read_bytes() == b"".join(b"[worker 0] %b\n" % x for x in lines)


def test_streams_are_kept_apart_and_a_partial_last_line_is_written(launch):
    result = launch("os.write(1, b'one\\ntwo'); os.write(2, b'three'); sys.exit(2)")

    assert result.stdout == "[worker 0] one\n[worker 0] two\n"
    assert "[worker 0] three\n" in result.stderr


def test_log_dir_has_a_file_per_worker_and_attempt(launch, tmp_path):
    logs = tmp_path / "new" / "logs"

    launch(
        "os.write(1, b'out\\r\\n'); os.write(2, b'err'); sys.exit(name == 'worker1')",
        num_workers=2,
        max_restarts=1,
        log_dir=logs,
    )

    files = sorted(path.name for path in logs.iterdir())
    assert files == [f"worker-{i}.restart-{n}.log" for i in (0, 1) for n in (0, 1)]
    # The two streams are two pipes: their order among each other is not known.
    assert sorted((logs / "worker-1.restart-0.log").read_bytes()) == sorted(b"out\r\nerr")


def test_report_without_a_launcher_does_nothing():
    report(step=1, environ={})
    report(step=1, environ={"DISTRIBUTARY_STATUS_FD": "4711"})
    report(step=1, environ={"DISTRIBUTARY_STATUS_FD": "no number"})


def test_report_writes_a_line_of_json_and_never_waits():
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    try:
        for _ in range(10_000):  # more than the pipe holds
            report(step=3, environ={"DISTRIBUTARY_STATUS_FD": str(write_fd)})
        first, _, _ = os.read(read_fd, 4096).partition(b"\n")
    finally:
        os.close(read_fd)
        os.close(write_fd)

    assert json.loads(first) == {"step": 3}


def test_many_numbers_come_in_lines_that_are_written_whole(monkeypatch):
    monkeypatch.setattr(progress, "values", {})
    numbers = {f"metric_{i}": i / 3 for i in range(100)}
    read_fd, write_fd = os.pipe()
    try:
        environ = {"DISTRIBUTARY_STATUS_FD": str(write_fd)}
        report(environ=environ, **numbers, loss=np.float32("nan"))
        lines = os.read(read_fd, 1 << 16).splitlines(keepends=True)
    finally:
        os.close(read_fd)
        os.close(write_fd)

    assert max(map(len, lines)) <= 512  # what POSIX writes as a whole
    assert {name: x for line in lines for name, x in json.loads(line).items()} == numbers


@pytest.mark.parametrize("line", ["nonsense", '{"step": "x"}', "x" * 2000])
def test_nonsense_on_the_status_channel_is_named_once(line, launch):
    script = f"""
for _ in range(3):
    os.write(int(os.environ["DISTRIBUTARY_STATUS_FD"]), {line + chr(10)!r}.encode())
time.sleep(0.1)
"""
    result = launch(script)

    assert result.code == 0
    assert (
        result.stderr.count("worker 0 writes lines to DISTRIBUTARY_STATUS_FD that are not JSON")
        == 1
    )


def test_steps_over_datasets_are_reported_by_themselves():
    program = """
import jax.numpy as jnp
import numpy as np
import distributary as dist

strategy = dist.MirroredStrategy()
dataset = dist.data.Dataset.from_tensor_slices(np.zeros((64, 2), np.float32)).batch(16)
while True:
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(jnp.sum, args=(batch,))
"""
    read_fd, write_fd = os.pipe()
    environ = {**os.environ, "DISTRIBUTARY_STATUS_FD": str(write_fd), "JAX_NUM_CPU_DEVICES": "2"}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, pass_fds=[write_fd])
    try:
        os.close(write_fd)
        with open(read_fd) as status:
            made, first, second = (json.loads(status.readline()) for _ in range(3))
    finally:
        process.kill()
        process.wait()

    assert made == {"num_steps": 0}
    assert second["step"] > first["step"] > 0
    assert second["examples_per_second"] > 0
