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
from tests.servers.processes import Cluster
from tests.servers.wire import (
    Credentials,
    GrpcLink,
    GrpcServer,
    InProcessLink,
    Message,
    make_certificates,
)

_PEER = Path(__file__).parent / "programs" / "peer.py"


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
                return Message("ok", arrays=[np.zeros(1 << 25, np.uint8)])
            case "own error":
                raise OwnError("no such row")
            case "mismatch":
                raise ReplicaMismatchError("shapes differ")
            case "key error":
                raise KeyError("name")
            case _:
                raise ValueError(f"what is {message.kind!r}?")


class Reply:
    """A service that replies to everything with the same fields."""

    def __init__(self, **fields):
        self._fields = fields

    def handle(self, message, peer):
        return Message("ok", self._fields)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates") / "certs"
    make_certificates(folder)
    return folder


@pytest.fixture(scope="session")
def cluster(certificates):
    """Processes of two workers and two servers; a test that ends some starts them again."""
    with contextlib.ExitStack() as stack:
        yield Cluster(stack, certificates)


@pytest.fixture
def service():
    service = Services()
    yield service
    service.go_on.set()


@pytest.fixture
def serve(service):
    """A function that serves `service`, or another one, and returns the address."""
    with contextlib.ExitStack() as stack:

        def start(address="127.0.0.1:0", credentials=None, service=service, **options):
            insecure = credentials is None
            server = GrpcServer(service, address, credentials, insecure=insecure, **options)
            stack.callback(server.close)
            return server.address

        yield start


@pytest.fixture
def connect(service, certificates):
    """A function that returns a link to a task at an address, with the certificate of a role."""
    with contextlib.ExitStack() as stack:

        def start(address, role=None, task="ps"):
            credentials = role and Credentials.load(certificates, role)
            link = GrpcLink(address, task, credentials)
            stack.callback(link.close)
            stack.callback(service.go_on.set)
            return link

        yield start


@pytest.fixture
def faults():
    """What happens to the next requests of `link_in_process`, instead of `deliver(message)`."""
    return []


@pytest.fixture
def link_in_process(service, faults):
    def fault(message, deliver):
        return faults.pop(0)(message, deliver) if faults else deliver(message)

    link = InProcessLink(service, name="ps 0", fault=fault)
    yield link
    service.go_on.set()
    link.close()


@pytest.fixture(params=["objects", "grpc", "mtls"])
def link(request, serve, connect):
    """A link to `service`, by each of the transports."""
    match request.param:
        case "objects":
            return request.getfixturevalue("link_in_process")
        case "grpc":
            return connect(serve())
        case "mtls":
            folder = request.getfixturevalue("certificates")
            address = serve(credentials=Credentials.load(folder, "ps"))
            return connect(address, "worker")


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
