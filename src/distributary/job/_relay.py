"""A relay to JAX's coordination service that keeps connections open when the service dies."""

import os
import socket
import subprocess
import sys
from pathlib import Path

_PROGRAM = Path(__file__).with_name("_relay_process.py")

_processes: list["subprocess.Popen[bytes]"] = []  # each ends when its stdin is closed


def relay_to(address: tuple[str, int]) -> str:
    """Starts a relay that passes connections on to `address`, and returns its loopback address.

    JAX's client ends the process from C++, without a message, as soon as its connection to the
    service breaks. The relay keeps that connection open; `Liveness` tells which worker is lost.

    The relay is a process of its own, which ends with this one. A thread of this process could not
    pass on an answer, because JAX holds Python's lock while it asks the service, for example when a
    preempted job agrees on a step.

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
            start_new_session=True,  # spares it signals to all processes of a job
        )
        _processes.append(process)
        return f"127.0.0.1:{server.getsockname()[1]}"
