"""A way to JAX's coordination service that does not break when the service dies."""

import os
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["relay_pids", "relay_to"]

_PROGRAM = Path(__file__).with_name("_relay_process.py")

_processes: list["subprocess.Popen[bytes]"] = []  # each ends when its stdin is closed


def relay_pids() -> frozenset[int]:
    """Returns the numbers of the processes that relay."""
    return frozenset(process.pid for process in _processes)


def relay_to(address: tuple[str, int]) -> str:
    """A loopback address of this machine whose connections are passed on to `address`.

    JAX's client ends the process from C++, without a sentence, as soon as its connection to the
    service breaks. A connection of the relay stays open then; who is lost is told by `Liveness`.

    The relay is a process of its own, which ends with this one: JAX asks the service for things
    with Python's lock held, when a preempted job agrees on a step for example, so no thread of this
    process could pass the answer on.

    Args:
        address: Host and port of the service.

    Returns:
        `"127.0.0.1:PORT"`.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = address
        arguments = [str(server.fileno()), str(os.getpid()), host, str(port)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(server.fileno(),),
            start_new_session=True,  # signals to all processes of a job are not for it
        )
        _processes.append(process)
        return f"127.0.0.1:{server.getsockname()[1]}"
