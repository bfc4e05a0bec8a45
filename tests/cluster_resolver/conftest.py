"""An environment without anything that a launcher has set, and a server to ask."""

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

_PREFIXES = ("CLOUD_TPU_", "GCE_METADATA_", "MEGASCALE_", "MPI_", "OMPI_", "PMI_", "SLURM_", "TPU_")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    for name in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is restored whatever the code under test sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/nonexistent")  # no nvidia-smi


@pytest.fixture
def set_environ(monkeypatch) -> Callable[..., None]:
    """Sets environment variables; None unsets one."""

    def set_all(**variables: object) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))

    return set_all


class AnsweringServer:
    """A real HTTP server on this machine.

    Args:
        answers: What it answers, by path: a status and a body, or a list of such pairs for one
            request after the other. Other paths are answered with 404.
    """

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, dict[str, str]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.requests.append((self.path, dict(self.headers)))
                answer = server.answers.get(self.path, (404, "no such path"))
                if isinstance(answer, list):
                    answer = answer.pop(0)
                status, body = answer
                data = body.encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, Any]], AnsweringServer]]:
    """A function that starts an `AnsweringServer`."""
    servers = []

    def start(answers):
        servers.append(AnsweringServer(answers))
        return servers[-1]

    yield start

    for server in servers:
        server.close()
