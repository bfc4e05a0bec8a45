"""Programs in processes of their own that find JAX, Keras and distributary imported.

To import them takes a process one to three seconds, and tests start hundreds. Here one process
imports them and starts nothing; programs run in forks of it. As in `python program.py`, a program
is `__main__`, runs until the interpreter ends, and has an environment of its own.

Forks have one seed of hashes, so their sets have one order: what must not depend on that is tested
with `subprocess`.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_MAX_REQUEST_BYTES = 1 << 20


class Fork:
    """A process that runs a program, with the methods of `subprocess.Popen`.

    Args:
        command: Path of the program, and its arguments.
        env: The environment. Of JAX's variables, it may change the number of CPU devices.
        stdin: An open file or `subprocess.PIPE`; None gives it an empty one.
        stdout: An open file or `subprocess.PIPE`.
        stderr: An open file; None for that of `stdout`.
        cwd: Folder to run in; None for that of the tests.
    """

    def __init__(
        self,
        command: Sequence[object],
        env: Mapping[str, str],
        *,
        stdin: IO[str] | int | None = None,
        stdout: IO[str] | int,
        stderr: IO[str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        request = {
            "command": list(map(str, command)),
            "env": dict(env),
            "path": sys.path,
            "folder": str(cwd or Path.cwd()),
        }
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        with contextlib.ExitStack() as stack:
            if stdin == subprocess.PIPE:
                reading, writing = os.pipe()
                self.stdin, stdin = os.fdopen(writing, "w"), stack.enter_context(open(reading))
            if stdout == subprocess.PIPE:
                reading, writing = os.pipe()
                self.stdout, stdout = os.fdopen(reading), stack.enter_context(open(writing, "w"))
            stdin = stdin or stack.enter_context(open(os.devnull))
            files = [file.fileno() for file in (stdin, stdout, stderr or stdout)]
            sys.audit("os.fork")  # as another process does it
            self.pid = _server().ask(request, files)
        self.returncode: int | None = None
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits for the end and returns the exit code, which is negative after a signal."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            os.close(self._ended)
            self.returncode = _server().ask({"ended": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks, seen from the tests."""

    def __init__(self) -> None:
        self._socket, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        environ |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with own:
            self._process = subprocess.Popen([sys.executable, __file__], stdin=own, env=environ)
        atexit.register(self._close)

    def ask(self, request: object, files: Sequence[int] = ()) -> int:
        """Returns the answer: the number of a new process, or the exit code of one that ended."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        return json.loads(self._socket.recv(_MAX_REQUEST_BYTES))

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


def _serve() -> dict[str, object] | None:
    """Answers requests until the tests end: returns in a fork what it is to run, else None."""
    connection = socket.socket(fileno=0)
    while True:
        message, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
        if not message:
            return None
        request = json.loads(message)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif answer := os.fork():
            for file in files:
                os.close(file)
        else:
            connection.detach()
            for number, file in enumerate(files):
                os.dup2(file, number)
            for file in files:
                os.close(file)
            return request
        connection.send(json.dumps(answer).encode())


def _run(command: list[str], env: dict[str, str], path: list[str], folder: str) -> None:
    """Runs a program as `python` does."""
    import jax
    import numpy as np

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if number := env.get("JAX_NUM_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", int(number))
    np.random.seed()
    program = Path(command[0])
    sys.argv = command
    sys.path[:] = [str(program.parent), *path]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(program)
    exec(compile(program.read_bytes(), program, "exec"), vars(main))


if __name__ == "__main__":
    import keras  # noqa: F401

    import distributary

    for _name in distributary.__all__:  # imported on first use
        getattr(distributary, _name)
    gc.set_threshold(20_000)
    gc.freeze()  # no search for garbage in a fork walks through, and copies, what was imported

    if _asked := _serve():
        _run(**_asked)
