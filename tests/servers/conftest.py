"""Services to call, and links to them."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from distributary.errors import ReplicaMismatchError
from distributary.servers._certificates import Credentials, make_certificates
from distributary.servers._grpc import GrpcLink, GrpcServer
from distributary.servers._links import InProcessLink
from distributary.servers._messages import Limits, Message
from distributary.servers._token import Token

_PEER = Path(__file__).parent / "programs" / "peer.py"
LIMITS = Limits(max_message_bytes=1 << 24)


class OwnError(LookupError):
    """An exception that the other end does not know."""


class Services:
    """A service that does what it is asked for, and remembers it."""

    def __init__(self):
        self.handled = []
        self.peers = []
        self.started = threading.Event()
        self.go_on = threading.Event()

    def handle(self, message, peer):
        self.handled.append(message.fields.get("i"))
        self.peers.append(peer)
        match message.kind:
            case "echo":
                return message
            case "double":
                return Message("ok", arrays=[2 * array for array in message.arrays])
            case "wait":
                self.started.set()
                self.go_on.wait()
                return Message("waited")
            case "huge":
                return Message("ok", arrays=[np.zeros(1 << 24, np.uint8)])
            case "own error":
                raise OwnError("no such row")
            case "mismatch":
                raise ReplicaMismatchError("shapes differ")
            case "key error":
                raise KeyError("name")
            case "timeout":
                raise TimeoutError("too slow")
            case _:
                raise ValueError(f"what is {message.kind!r}?")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates") / "certs"
    make_certificates(folder)
    return folder


@pytest.fixture
def service():
    service = Services()
    yield service
    service.go_on.set()


@pytest.fixture(params=["objects", "frames", "grpc", "mtls"])
def link(request, service):
    """A link to `service`, by each of the transports."""
    with contextlib.ExitStack() as stack:
        if request.param in ("objects", "frames"):
            limits = LIMITS if request.param == "frames" else None
            link = InProcessLink(service, name="ps 0", limits=limits)
        else:
            own = other = Token.new()
            if request.param == "mtls":
                folder = request.getfixturevalue("certificates")
                own, other = Credentials.load(folder, "worker"), Credentials.load(folder, "ps")
            server = GrpcServer(service, "127.0.0.1:0", other, LIMITS, task="ps")
            stack.callback(server.close)
            link = GrpcLink(server.address, "ps", own, LIMITS)
        stack.callback(service.go_on.set)
        stack.callback(link.close)
        yield link


@pytest.fixture
def start_peer():
    """A function that starts a process of programs/peer.py and returns it and its address."""
    with contextlib.ExitStack() as stack:

        def start(address):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, _PEER, address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            )
            stack.callback(process.kill)
            return process, process.stdout.readline().strip()

        yield start
