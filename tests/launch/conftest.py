"""Jobs of small Python scripts, in this process or behind the real command."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from distributary.launch import HostOptions, LaunchOptions, free_addresses, run

_SECONDS = 120.0  # for anything that is waited for; things take far less

# Without the settings that this test process has made for itself.
_SETTINGS = ("JAX_NUM_CPU_DEVICES", "PJRT_NPROC", "XLA_FLAGS")
_BASE_ENVIRON = {name: value for name, value in os.environ.items() if name not in _SETTINGS}

_PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time

config = json.loads(os.environ["TF_CONFIG"])
name = config["task"]["type"] + str(config["task"]["index"])
restart = int(os.environ["DISTRIBUTARY_RESTART"])
folder = pathlib.Path(__file__).parent

def put(file, text=""):
    (folder / f"{file}.new").write_text(str(text))
    (folder / f"{file}.new").rename(folder / file)

def wait_for(file):
    end = time.monotonic() + 30
    while not (folder / file).exists():
        assert time.monotonic() < end, f"{name} has waited in vain for {file}"
        time.sleep(0.01)

def run_forever():
    put(f"{name}.{restart}.pid", os.getpid())
    while True:
        signal.pause()

"""


@dataclass
class Result:
    """How a job has ended, and what it has written."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def script(tmp_path) -> Callable[[str], Path]:
    """A function that writes a worker's script."""

    def write(text: str) -> Path:
        path = tmp_path / "worker.py"
        path.write_text(_PRELUDE + text)
        return path

    return write


@pytest.fixture
def launch(script, tmp_path) -> Callable[..., Result]:
    """A function that runs a script as a job in this process."""

    def launch(
        text: str,
        *arguments: str,
        environ: dict[str, str] | None = None,
        hosts: HostOptions | None = None,
        **options,
    ) -> Result:
        command = (sys.executable, str(script(text)), *arguments)
        out, err = tmp_path / "stdout", tmp_path / "stderr"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            code = run(
                LaunchOptions(command, hosts=hosts, **options),
                environ={**_BASE_ENVIRON, **(environ or {})},
                stdout_fd=out_file.fileno(),
                stderr_fd=err_file.fileno(),
            )
        texts = [file.read_bytes().decode("utf-8", "surrogateescape") for file in (out, err)]
        return Result(code, *texts)

    return launch


@pytest.fixture
def address() -> str:
    """A free address; nothing reserves it."""
    return free_addresses("127.0.0.1", 1)[0]


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """A function that starts `distributary launch` with arguments, as a process of its own.

    `before` is a command that becomes the launcher.
    """
    processes = []

    def start(*arguments: object, before: Sequence[str] = (), **options) -> subprocess.Popen:
        environ = {**_BASE_ENVIRON, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environ |= options.pop("environ", {})
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "distributary", "launch", *map(str, arguments)],
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=options.pop("stderr", subprocess.PIPE),
            text=True,
            env=environ,
            **options,
        )
        processes.append(process)
        return process

    yield start

    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=_SECONDS)


@pytest.fixture
def pid_of(tmp_path) -> Callable[..., int]:
    """A function that waits for a worker of `run_forever()` and returns its process id."""

    def pid_of(name: str, restart: int = 0) -> int:
        file = tmp_path / f"{name}.{restart}.pid"
        wait_until(file.exists, f"{file.name} exists")
        return int(file.read_text())

    return pid_of


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another process does."""
    end = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < end, f"not so after {_SECONDS} s: {what}"
        time.sleep(0.01)


@pytest.fixture
def wait_until_gone() -> Callable[..., None]:
    """A function that waits until processes have ended."""

    def is_gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def wait(*pids: int) -> None:
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid), f"process {pid} has ended")

    return wait
