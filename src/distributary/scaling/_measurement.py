"""Runs a script once for each number of replicas, with that number of devices."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from distributary.errors import LaunchError
from distributary.launch import ALLOCATOR_SETTINGS
from distributary.scaling._timer import Timing
from distributary.topology import num_cores

__all__ = ["Program", "Row", "default_replicas", "measure"]

_NUM_LAST_LINES = 20


@final
@dataclass(frozen=True)
class Program:
    """A script that trains.

    Args:
        script: Path of the script, or name of a module.
        arguments: Arguments of the script.
        is_module: Whether `script` names a module.
        step_name: Name of the step's function; None for the first program that updates a trainable
            variable.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool = False
    step_name: str | None = None


@final
@dataclass(frozen=True)
class Row:
    """The measurement with one number of replicas.

    Args:
        timing: The measurement.
        efficiency: Examples per second and replica, divided by those with the smallest number of
            replicas; None if the batch size is unknown.
    """

    timing: Timing
    efficiency: float | None

    @property
    def examples_per_second(self) -> float | None:
        """Examples per second of all replicas together; None if the batch size is unknown."""
        examples = self.timing.examples_per_step
        return None if examples is None else examples / self.timing.seconds

    @property
    def communication(self) -> float:
        """Time of the all-reduces alone, divided by the time of the whole step."""
        return self.timing.reduction_seconds / self.timing.seconds


def default_replicas(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Returns 1, 2, 4, ... up to the number of GPUs, or of cores if there are none."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        num_gpus = len([*Path("/dev").glob("nvidia[0-9]*")])
    else:
        num_gpus = len([name for name in visible.split(",") if name.strip()])
    limit = num_gpus or num_cores()
    powers = [1 << i for i in range(limit.bit_length())]
    return tuple(powers if powers[-1] == limit else [*powers, limit])


def measure(
    program_of: Mapping[int, Program], seconds: float, environ: Mapping[str, str]
) -> list[Row]:
    """Measures a program with each number of replicas, one after the other.

    Args:
        program_of: The program for each number of replicas.
        seconds: Seconds for which to measure each.
        environ: The environment.

    Raises:
        LaunchError: if a program fails, or has another number of replicas.
    """
    timings = [_timed(program, n, seconds, environ) for n, program in sorted(program_of.items())]
    rates = [(t.examples_per_step or 0) / t.seconds / t.num_replicas for t in timings]
    is_known = all(timing.examples_per_step for timing in timings)
    return [
        Row(timing, rate / rates[0] if is_known else None)
        for timing, rate in zip(timings, rates, strict=True)
    ]


def _timed(
    program: Program, num_replicas: int, seconds: float, environ: Mapping[str, str]
) -> Timing:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "timing.json"
        command = [sys.executable, "-m", "distributary.scaling._child"]
        command += ["--result", str(result), "--seconds", str(seconds)]
        command += ["--step", program.step_name] if program.step_name is not None else []
        command += ["--module"] if program.is_module else []
        process = subprocess.run(
            [*command, program.script, *program.arguments],
            env=_environ(num_replicas, environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if process.returncode or not result.exists():
            lines = process.stdout.splitlines()[-_NUM_LAST_LINES:]
            raise LaunchError(
                f"With --replicas {num_replicas}, {program.script} ended with exit code"
                f" {process.returncode}. Its last lines:\n  " + "\n  ".join(lines)
            )
        content = json.loads(result.read_text(encoding="utf-8"))
    timing = Timing(**{**content, "block_seconds": tuple(content["block_seconds"])})
    if timing.num_replicas != num_replicas:
        raise LaunchError(
            f"{program.script} has {timing.num_replicas} replicas, expected {num_replicas}. Let its"
            " strategy use all devices, as MirroredStrategy() does, and ask for at most as many"
            " replicas as there are GPUs. A TPU can only be measured as a whole."
        )
    return timing


def _environ(num_replicas: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with this number of CPU devices and GPUs."""
    result = {**ALLOCATOR_SETTINGS, **environ} if sys.platform == "linux" else dict(environ)
    gpus = environ.get("CUDA_VISIBLE_DEVICES")
    names = gpus.split(",") if gpus else [str(i) for i in range(num_replicas)]
    if gpus != "":
        result["CUDA_VISIBLE_DEVICES"] = ",".join(names[:num_replicas])
    result["JAX_NUM_CPU_DEVICES"] = str(num_replicas)
    result["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return result
