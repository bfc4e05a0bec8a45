"""Eight virtual CPU devices for every test, and a check that tests clean up behind them."""

import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")  # So does Keras.
# Most of the tests' time goes into compiling small programs. XLA:CPU cuts each program in up to 32
# pieces to compile them in parallel, which costs a third more than one piece, and spends a quarter
# of the rest on making code fast. (With no optimization at all, maxima of an axis can be wrong.) It
# is also quicker with its older generator of loops, with which versions after JAX 0.10 abort; with
# the newest version, `.ci/run` tests the code that users get. Most programs that tests start
# inherit these flags.
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1 "
    * version("jaxlib").startswith("0.10.")
    + f"--xla_cpu_parallel_codegen_split_count=1 {os.environ.get('XLA_FLAGS', '')}".rstrip()
)
# Tests and the processes that they start compile the same programs again and again. They share what
# one of them has compiled; pytest's workers and those processes inherit the folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax

import distributary as dist

# Must come before anything starts the JAX backends.
dist.config.set_logical_cpu_devices(8)

_THREAD_END_SECONDS = 1.0  # for a thread that was told to stop and is on its way out


# Tests that start processes take longest. Last of all, they would leave one of pytest's workers
# without work for minutes.
_FIRST = {"multiprocess", "launch", "tools", "test_examples.py", "test_docs.py"}


# Tests that start a process (a line for each file), or take more than a second beside others.
_SLOW = Path(__file__).with_name("slow.txt")
_SLOW_SECONDS = 1.0
# One real test of two workers, of servers and of a TensorFlow program: in the fast tier, too.
_NEVER_SLOW = {
    "tests/multiprocess/test_multi_worker.py::test_workers_compute_what_one_process_computes[2-2]",
    "tests/servers/test_servers.py::test_training_equals_numpy",
    "tests/tensorflow/test_examples.py::test_programs_of_one_process",
}
_num_processes = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-slow", action="store_true", help=f"writes {_SLOW.name} anew")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts a process, or takes more than a second")
    if config.getoption("--record-slow"):
        config.pluginmanager.register(_SlowTests())
    # `&` of a shell, and `nohup`, let a program and all that it starts ignore these.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _FIRST.isdisjoint(item.path.parts))
    slow = set(_SLOW.read_text().split()) if _SLOW.exists() else set()
    for item in items:
        names = {item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]}
        if slow & names and item.nodeid not in _NEVER_SLOW:
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("-m") == "not slow":
        terminalreporter.write_line(
            "This was the fast tier. All tests: .venv/bin/python -m pytest -q -n 2 --dist worksteal"
        )


def _count_process(event: str, args: object) -> None:
    global _num_processes
    _num_processes += event in ("subprocess.Popen", "os.fork", "os.posix_spawn")


class _SlowTests:
    """Finds out which tests are slow. In pytest's workers, it only counts processes."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._starting: set[str] = set()
        sys.addaudithook(_count_process)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._before = _num_processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        if _num_processes > self._before:
            item.user_properties.append(("starts a process", True))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, name = report.nodeid.partition("::")[0], report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if dict(report.user_properties).get("starts a process"):
            self._starting.add(file)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        slow = {name for name, seconds in self._seconds.items() if seconds > _SLOW_SECONDS}
        slow = {
            name.partition("[")[0] for name in slow if name.partition("::")[0] not in self._starting
        }
        _SLOW.write_text("".join(f"{name}\n" for name in sorted(slow | self._starting)))


@pytest.fixture
def strategy_of() -> Callable[[int], dist.MirroredStrategy]:
    """A function that returns a `MirroredStrategy` on the given number of CPU devices."""
    return lambda num_replicas: dist.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


@pytest.fixture
def strategy(strategy_of: Callable[[int], dist.MirroredStrategy]) -> dist.MirroredStrategy:
    """A `MirroredStrategy` of two replicas."""
    return strategy_of(2)


@pytest.fixture
def variable(strategy: dist.MirroredStrategy) -> Callable[..., dist.Variable]:
    """A function that creates a variable in the scope of `strategy`."""

    def create(*args: Any, **kwargs: Any) -> dist.Variable:
        with strategy.scope():
            return dist.Variable(*args, **kwargs)

    return create


@pytest.fixture
def impostor() -> Iterator[Callable[[str, str], str]]:
    """A function that lets another program listen at a host, at the port of an address.

    It passes on what it gets to the address. The function returns where it listens.
    """
    with ExitStack() as stack:

        def start(host: str, address: str) -> str:
            real_host, port = address.split(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, int(port)), family=family) as server:
                program = str(Path(dist.job.__path__[0]) / "_relay_process.py")
                arguments = str(server.fileno()), str(os.getpid()), real_host, port
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", program, *arguments],
                    stdin=subprocess.PIPE,
                    pass_fds=(server.fileno(),),
                )
            stack.enter_context(process)
            stack.callback(process.kill)
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

        yield start


@pytest.fixture
def localhost_is_ipv6_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets localhost stand for ::1 and 127.0.0.1, in this order, as on many systems."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        hosts = ["::1", "127.0.0.1"] if host == "localhost" else [host]
        return [found for one in hosts for found in real(one, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 600 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def compilations() -> Callable[[], AbstractContextManager[list[str]]]:
    """`with compilations() as compiled`: the functions that XLA compiles inside."""
    return _compilations


@contextmanager
def _compilations() -> Iterator[list[str]]:
    compiled: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(details.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
        found = compiled.copy()
        jax.jit(lambda x: x - 12.5)(1)
        assert len(compiled) > len(found), "the listener hears nothing"
        compiled[:] = found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True, scope="module")
def _only_new_garbage() -> None:
    # A search for garbage takes a second after some hundred tests, unless it leaves out what they
    # have left in JAX's caches.
    gc.collect()
    gc.freeze()


# Set up before the fixtures a test asks for, so it looks after those have cleaned up.
@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    threads_before = set(threading.enumerate())
    environ_before = _environ()

    yield

    assert not dist.has_strategy(), "the test left a strategy scope open"
    threads = [t for t in threading.enumerate() if t not in threads_before and not t.daemon]
    for thread in threads:
        thread.join(_THREAD_END_SECONDS)
    assert [t for t in threads if t.is_alive()] == [], "the test left threads running"
    assert _environ() == environ_before, "the test changed os.environ"


# pytest keeps the phase of the running test in the first; `import tensorflow` sets the others.
_SET_BY_OTHERS = {
    "PYTEST_CURRENT_TEST",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",
    "TF2_BEHAVIOR",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
}


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_OTHERS}


@pytest.fixture
def full_disk():
    """A block in which files are not larger than a number of bytes."""

    @contextmanager
    def full_disk(num_bytes=0):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return full_disk
