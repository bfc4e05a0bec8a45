"""Lines of the workers arrive whole, in order and with their prefix."""

import json
import os
import subprocess

import numpy as np
import pytest

from distributary.devices import progress
from distributary.launch import report
from tests.forks import Fork


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


def test_streams_are_kept_apart_and_log_dir_has_a_file_per_worker_and_attempt(launch, tmp_path):
    logs = tmp_path / "new" / "logs"

    result = launch(
        "os.write(1, b'one\\r\\ntwo'); os.write(2, b'three'); sys.exit(name == 'worker1')",
        num_workers=2,
        max_restarts=1,
        log_dir=logs,
    )

    lines = [line for line in result.stdout.splitlines() if line.startswith("[worker 1]")]
    assert lines == 2 * ["[worker 1] one", "[worker 1] two"]
    assert result.stderr.count("[worker 1] three\n") == 2
    files = sorted(path.name for path in logs.iterdir())
    assert files == [f"worker-{i}.restart-{n}.log" for i in (0, 1) for n in (0, 1)]
    # The two streams are two pipes: their order among each other is not known.
    written = (logs / "worker-1.restart-0.log").read_bytes()
    assert sorted(written) == sorted(b"one\r\ntwothree")


@pytest.mark.parametrize("descriptor", [None, "4711", "no number"])
def test_report_without_a_launcher_does_nothing(descriptor):
    report(step=1, environ={} if descriptor is None else {"DISTRIBUTARY_STATUS_FD": descriptor})


@pytest.fixture
def pipe():
    """The end of a launcher, and the environment of its worker."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    yield read_fd, {"DISTRIBUTARY_STATUS_FD": str(write_fd)}
    os.close(read_fd)
    os.close(write_fd)


def test_report_writes_a_line_of_json_and_never_waits(pipe):
    read_fd, environ = pipe
    for _ in range(10_000):  # more than the pipe holds
        report(step=3, environ=environ)

    first, _, _ = os.read(read_fd, 4096).partition(b"\n")

    assert json.loads(first) == {"step": 3}


def test_many_numbers_come_in_lines_that_are_written_whole(pipe, monkeypatch):
    monkeypatch.setattr(progress, "values", {})
    numbers = {f"metric_{i}": i / 3 for i in range(100)}
    read_fd, environ = pipe

    report(environ=environ, **numbers, loss=np.float32("nan"))

    lines = os.read(read_fd, 1 << 16).splitlines(keepends=True)
    assert max(map(len, lines)) <= 512  # what POSIX writes as a whole
    assert {name: x for line in lines for name, x in json.loads(line).items()} == numbers


def test_a_log_that_cannot_be_written_ends_alone(launch, tmp_path):
    logs = tmp_path / "logs \udcff"  # a name that is no text
    logs.mkdir()
    (logs / "worker-0.restart-0.log").symlink_to("/dev/full")

    result = launch("print('one', flush=True)\ntime.sleep(0.1)\nprint('x' * 200_000)", log_dir=logs)

    assert (result.code, len(result.stdout)) == (0, len("[worker 0] one\n[worker 0] \n") + 200_000)
    assert result.stderr.count("is not written any more: No space left on device.") == 1


def test_a_job_starts_again_without_room_for_logs(launch, tmp_path):
    script = """
import shutil
print("begun")
shutil.rmtree(folder / "logs", ignore_errors=True)
sys.exit(restart == 0)
"""
    result = launch(script, max_restarts=1, log_dir=tmp_path / "logs")

    assert (result.code, result.stdout) == (0, 2 * "[worker 0] begun\n")
    assert "worker-0.restart-1.log is not written: No such file or directory." in result.stderr


@pytest.mark.parametrize(
    "line", ["nonsense", '{"step": "x"}', "x" * 2000, "[" * 3000, '{"step": 1' + "0" * 400 + "}"]
)
def test_nonsense_on_the_status_channel_is_named_once(line, launch):
    script = f"""
for _ in range(3):
    os.write(int(os.environ["DISTRIBUTARY_STATUS_FD"]), {line + chr(10)!r}.encode())
time.sleep(0.1)
"""
    result = launch(script + "print('x' * 200_000)")  # more than a pipe holds

    assert result.code == 0
    assert (
        result.stderr.count("worker 0 writes lines to DISTRIBUTARY_STATUS_FD that are not JSON")
        == 1
    )


def test_steps_over_datasets_are_reported_by_themselves(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import jax.numpy as jnp
import numpy as np
import distributary as dist

strategy = dist.MirroredStrategy()
dataset = dist.data.Dataset.from_tensor_slices(np.zeros((64, 2), np.float32)).batch(16)
while True:
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(jnp.sum, args=(batch,))
""")
    environ = {**os.environ, "DISTRIBUTARY_STATUS_FD": "1", "JAX_NUM_CPU_DEVICES": "2"}
    with (tmp_path / "stderr").open("w") as stderr:
        process = Fork([program], environ, stdout=subprocess.PIPE, stderr=stderr)
    with process.stdout as status:
        made, first, second = (json.loads(status.readline()) for _ in range(3))
        process.kill()
        process.wait(100)

    assert made == {"num_steps": 0}
    assert second["step"] > first["step"] > 0
    assert second["examples_per_second"] > 0
