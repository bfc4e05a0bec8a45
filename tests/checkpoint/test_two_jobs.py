"""Two jobs that save to one folder: the first has it until it ends, however it ends."""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import tempfile
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

from distributary.checkpoint import Checkpoint, CheckpointManager, release
from distributary.errors import CheckpointError
from tests.forks import Fork

_SECONDS = 120.0
_JOB = """
import json, os, signal, sys, warnings
import numpy as np
from distributary.checkpoint import Checkpoint, CheckpointManager
from distributary.errors import CheckpointError

warnings.simplefilter("ignore")  # JAX warns of os.fork
managers, umask, setuid = {}, os.umask, os.setuid
checkpoint = Checkpoint(step=0, a=np.zeros(1000))


def manager(directory, max_to_keep):
    if directory not in managers:
        managers[directory] = CheckpointManager(checkpoint, directory, max_to_keep)
    return managers[directory]


def save(directory, step, num_saves=1, max_to_keep=None):
    saved = []
    for i in range(num_saves):
        checkpoint.step, checkpoint.a[:] = step + i, step + i
        try:
            saved.append(manager(directory, max_to_keep).save())
            manager(directory, max_to_keep).wait_until_finished()
        except CheckpointError as error:
            saved[i:] = [str(error)]
    return saved


def write(path, step):
    checkpoint.step = step
    try:
        return checkpoint.write(path)
    except CheckpointError as error:
        return str(error)


def restore(path):
    checkpoint.restore(path)
    return checkpoint.step


def fork():
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        signal.pause()
    return child


def fork_and_save(path):
    read, written = os.pipe()
    if os.fork() == 0:
        os.write(written, write(path, 5).encode())
        os._exit(0)
    os.wait()
    return os.read(read, 10_000).decode()


print(json.dumps(os.getpid()), flush=True)
for line in sys.stdin:
    function, *arguments = json.loads(line)
    print(json.dumps(globals()[function](*arguments)), flush=True)
"""


class _Job:
    def __init__(self, directory):
        environ = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
        program = directory / "job.py"
        if not program.exists():  # the first job may be reading it
            program.write_text(_JOB)
        with (directory / f"job-{os.urandom(4).hex()}.log").open("w") as log:
            self.process = Fork([program], environ, stdin=PIPE, stdout=PIPE, stderr=log)

    def tell(self, *call):
        self.process.stdin.write(json.dumps(call, default=str) + "\n")
        self.process.stdin.flush()

    def result(self):
        assert select.select([self.process.stdout], [], [], _SECONDS)[0]
        return json.loads(self.process.stdout.readline())

    def __call__(self, *call):
        self.tell(*call)
        return self.result()

    def end(self):
        """Lets it end by itself."""
        self.process.stdin.close()
        assert self.process.wait(_SECONDS) == 0

    def kill(self):
        self.process.kill()
        self.process.wait(_SECONDS)
        self.process.stdin.close()


@pytest.fixture
def jobs(tmp_path_factory):
    """Two processes that save."""
    logs = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as stack:
        made = [_Job(logs) for _ in range(2)]
        for job in made:
            stack.callback(job.process.stdout.close)
            stack.callback(job.kill)
        assert [job.result() for job in made] == [job.process.pid for job in made]
        yield made


def _refusal(path, job):
    host, folder = os.uname().nodename, path.parent
    return re.compile(
        rf"^The checkpoint {path} was not written: process {job.process.pid} on host {host}"
        rf" \(since .*\) saves to {folder} under the same name, .*End it, or choose"
    )


def test_of_two_jobs_that_save_at_once_one_saves_and_loses_nothing(jobs, tmp_path):
    for job, step in zip(jobs, (100, 200), strict=True):
        job.tell("save", tmp_path, step, 10)
    results = [job.result() for job in jobs]

    (winner,) = (i for i in range(2) if results[i][0] == str(tmp_path / "ckpt-1"))
    assert results[winner] == [str(tmp_path / f"ckpt-{i}") for i in range(1, 11)]
    for i, message in enumerate(results[1 - winner], start=1):
        assert _refusal(tmp_path / f"ckpt-{i}", jobs[winner]).match(message), message
    checkpoint = Checkpoint(step=0, a=np.zeros(1000))
    for i, path in enumerate(results[winner]):
        checkpoint.restore(path)
        assert checkpoint.step == checkpoint.a[0] == checkpoint.a[-1] == 100 * (winner + 1) + i
    assert jobs[1 - winner]("restore", results[winner][-1]) == 100 * (winner + 1) + 9


def test_the_folder_is_free_when_its_job_ends_or_is_killed(jobs, tmp_path):
    first, second = jobs
    first("save", tmp_path, 1)
    assert _refusal(tmp_path / "ckpt-1", first).match(second("save", tmp_path, 2)[0])
    child = first("fork")  # as those that load data; it lives on
    try:
        first.kill()
        assert second("save", tmp_path, 3, 2, 2) == [str(tmp_path / f"ckpt-{i}") for i in (2, 3)]
    finally:
        os.kill(child, signal.SIGKILL)

    manager = CheckpointManager(Checkpoint(step=0, a=np.zeros(1000)), tmp_path, 2)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-3")
    assert manager.checkpoint.step == 4
    with pytest.raises(CheckpointError, match=rf"process {second.process.pid} on host"):
        manager.save()
    second.end()
    assert not list(tmp_path.glob(".*"))
    manager.save()
    assert [path[-6:] for path in manager.checkpoints] == ["ckpt-3", "ckpt-5"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_no_other_user_can_hold_the_lock_of_a_killed_job(mode, jobs, tmp_path):
    first, second = jobs
    lock = tmp_path / ".ckpt.distributary-lock"
    first("umask", 0)
    first("save", tmp_path, 1)
    first.kill()
    assert lock.stat().st_mode & 0o777 == 0o600
    lock.chmod(mode)  # as a version before has made it

    with lock.open() as opened:  # by another user, if it may
        assert second("save", tmp_path, 2) == [str(tmp_path / "ckpt-1")]
        second.kill()
        if mode != 0o600:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # holds what is no lock any more
        Checkpoint(step=3).save(tmp_path / "ckpt")

    assert lock.stat().st_mode & 0o777 == 0o600
    release(tmp_path, "ckpt")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_lock_of_another_user_is_named(jobs):
    first, second = jobs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o777)
        first("save", folder, 1)
        second("setuid", 65534)

        (message,) = second("save", folder, 2)

        lock = folder / ".ckpt.distributary-lock"
        assert f"{lock} is the lock of user root, whose job saves to {folder}" in message
        assert "If that job has ended, remove the file" in message


def test_other_names_and_folders_are_free(jobs, tmp_path):
    first, second = jobs
    first("save", tmp_path, 1)
    (tmp_path / "other").mkdir()

    for path in (tmp_path / "a", tmp_path / "model-1", tmp_path / "other" / "ckpt-1"):
        assert second("write", path, 1) == str(path)
        assert _refusal(path, second).match(first("write", path, 2))
        assert second("restore", path) == 1
    # As tasks of one array of jobs do.
    assert first("write", tmp_path / "model-2", 2) == str(tmp_path / "model-2")
    # Inside of the series of the other one.
    assert _refusal(tmp_path / "ckpt-9", first).match(second("write", tmp_path / "ckpt-9", 1))
    assert first("save", tmp_path, 5)[0] == str(tmp_path / "ckpt-2")
    assert first("write", tmp_path / "ckpt-1", 3) == str(tmp_path / "ckpt-1")
    message = first("fork_and_save", tmp_path / "ckpt-1")
    assert _refusal(tmp_path / "ckpt-1", first).match(message)
    # A folder that was removed meanwhile is locked again.
    for _ in range(2):
        shutil.rmtree(tmp_path / "other")
        first("save", tmp_path / "other", 1)
    assert "was not written: process" in second("save", tmp_path / "other", 2)[0]


def test_one_process_may_have_several_managers(tmp_path):
    checkpoint = Checkpoint(step=0, a=np.zeros(100_000))
    managers = [CheckpointManager(checkpoint, tmp_path, max_to_keep=None) for _ in range(3)]

    for checkpoint.step in range(1, 11):
        for manager in managers:
            manager.save()
        checkpoint.write(tmp_path / "now")
    for manager in managers:
        manager.wait_until_finished()

    steps = []
    for path in managers[0].checkpoints:
        checkpoint.restore(path)
        steps.append(checkpoint.step)
    assert steps == sorted(steps)
    assert len(steps) == 30


def test_locks_of_single_checkpoints_do_not_use_up_descriptors(tmp_path):
    checkpoint = Checkpoint(step=0)
    checkpoint.save(tmp_path / "series")

    for i in range(74):
        checkpoint.write(tmp_path / f"step {i}")

    locks = {path.name for path in tmp_path.glob(".*")}
    assert len(locks) == 64 + 1  # those of single checkpoints, and that of the series
    assert {".series.distributary-lock", f".step {i}.distributary-lock"} <= locks


def test_a_file_that_has_the_name_of_a_lock_stays(tmp_path):
    lock = tmp_path / ".ckpt.distributary-lock"
    lock.write_text("notes")

    with pytest.raises(CheckpointError, match=rf"{lock} is not a lock of checkpoints, but has"):
        Checkpoint(step=0).save(tmp_path / "ckpt")

    assert lock.read_text() == "notes"
    assert [p.name for p in Path(tmp_path).iterdir()] == [lock.name]
