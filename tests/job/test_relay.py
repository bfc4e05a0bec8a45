"""The relay to JAX's coordination service, with a process that is stuck in C with Python's lock."""

import os
import signal
import socket
import subprocess
import sys

_PROGRAM = """
import ctypes, os, signal, sys
from distributary.job._connection import relay_to

address = relay_to(("127.0.0.1", int(sys.argv[1])))
child = os.fork()  # which keeps open what it inherits
if not child:
    signal.pause()
print(address, child, flush=True)
ctypes.PyDLL(None).pause()  # no thread of this process runs any more
"""


def test_a_relay_needs_nothing_of_its_process_but_ends_with_it():
    with (
        socket.create_server(("127.0.0.1", 0)) as service,
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(service.getsockname()[1])],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        ) as process,
    ):
        address, child = process.stdout.readline().split()
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(b"question")
            passed_on, _ = service.accept()
            with passed_on:
                assert passed_on.recv(100) == b"question"
                passed_on.sendall(b"answer")
                assert client.recv(100) == b"answer"
            process.kill()
            assert client.recv(100) == b""  # not before: the service is gone for some time
        os.kill(int(child), signal.SIGKILL)
