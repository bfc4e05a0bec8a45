"""An environment without anything that a launcher has set, and a server to ask."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType

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
        answers: Bodies by path. Other paths are answered with 404.
    """

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, dict[str, str]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.requests.append((self.path, dict(self.headers)))
                data = server.answers.get(self.path, "no such path").encode()
                self.send_response(200 if self.path in server.answers else 404)
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
def install(tmp_path, monkeypatch) -> Callable[[str, str], ModuleType]:
    """A function that puts source text in the place of a module, and imports it."""

    def install(name: str, text: str) -> ModuleType:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        parents = [name.rsplit(".", number)[0] for number in range(name.count(".") + 1)]
        for module in parents:
            monkeypatch.setitem(sys.modules, module, None)  # so that it is restored
            del sys.modules[module]
        return importlib.import_module(name)

    return install


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, str]], AnsweringServer]]:
    """A function that starts an `AnsweringServer`."""
    servers = []

    def start(answers):
        servers.append(AnsweringServer(answers))
        return servers[-1]

    yield start

    for server in servers:
        server.close()
