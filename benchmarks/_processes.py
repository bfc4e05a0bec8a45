"""Fresh processes for measurements: their environment, their result, their time limit."""

import json
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "ChildFailedError",
    "environment",
    "peak_bytes",
    "reset_peak",
    "return_result",
    "run_child",
]

Json: TypeAlias = Any

_SOURCE = Path(__file__).resolve().parent.parent / "src"
_MARK = "RESULT "


class ChildFailedError(RuntimeError):
    """A measuring process ended with an error or did not end in time."""


def environment(num_replicas: int | None = None, platform: str = "cpu") -> dict[str, str]:
    """This process's environment, with this checkout's package first on the path.

    Args:
        num_replicas: Also give JAX this many logical CPU devices, and a thread pool in which
            their all-reduces cannot starve each other; on a GPU, as much memory as it uses, so that
            several processes fit.
        platform: `"cpu"` or `"gpu"`.
    """
    # Parameter servers ask for it; the chief may be this process.
    os.environ.setdefault("DISTRIBUTARY_TOKEN", secrets.token_hex(16))
    environ = dict(os.environ)
    inherited = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([str(_SOURCE), *([inherited] if inherited else [])])
    if num_replicas is not None:
        environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu"}[platform]
        environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        environ["KERAS_BACKEND"] = "jax"
        environ["JAX_NUM_CPU_DEVICES"] = str(num_replicas)
        # Every replica of a dispatched step holds a thread while it waits in a collective: with
        # fewer than two threads per replica, two steps in flight can wait for each other.
        environ["PJRT_NPROC"] = str(max(os.cpu_count() or 1, 2 * num_replicas))
    return environ


def run_child(
    script: str | Path,
    request: Mapping[str, Json],
    num_replicas: int,
    timeout_seconds: float,
    platform: str = "cpu",
) -> Json:
    """Runs `script --child REQUEST` in a fresh process and returns what it hands back.

    Raises:
        ChildFailedError: If the process fails, hands back nothing or takes too long; its
            process group is ended then.
    """
    child = subprocess.Popen(
        [sys.executable, str(script), "--child", json.dumps(request)],
        env=environment(num_replicas, platform),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise ChildFailedError(f"no result within {timeout_seconds:.0f} s: {request}") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    results = [line for line in output.splitlines() if line.startswith(_MARK)]
    if child.returncode or not results:
        raise ChildFailedError(f"exit status {child.returncode} for {request}; see above")
    return json.loads(results[-1].removeprefix(_MARK))


_NAMING = ("section", "workload", "replicas")  # what of a request says which one it is


def run_children(
    script: str | Path, requests: Iterable[tuple[Mapping[str, Json], int]], timeout_seconds: float
) -> tuple[list[Json], bool]:
    """Runs one child after the other; see `run_child`. Says on stderr which failed.

    Args:
        script: The program.
        requests: What each is asked, and the number of its devices.
        timeout_seconds: The time each has.

    Returns:
        What they hand back, and whether one failed.
    """
    rows: list[Json] = []
    failed = False
    for request, num_devices in requests:
        what = [f"{name} {request[name]}" for name in _NAMING if name in request]
        print(f"{', '.join(what)} ...", file=sys.stderr, flush=True)
        try:
            rows.append(run_child(script, request, num_devices, timeout_seconds))
        except ChildFailedError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            failed = True
    return rows, failed


def return_result(result: Json) -> None:
    """Hands `result` back to `run_child`; called by the child, once, at the end."""
    print(_MARK + json.dumps(result), flush=True)


def reset_peak() -> bool:
    """Lets Linux forget the process's peak; False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """The process's largest resident memory, since `reset_peak` if that was called."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
