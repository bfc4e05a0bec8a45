"""Runs a script up to its training step, and compiles the step for another machine."""

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributary.compilation._programs import Programs, ScriptEnded
from distributary.compilation._report import Report, report_of
from distributary.compilation._topologies import Topology
from distributary.errors import CompileError, InvalidValueError
from distributary.topology import Target, aim_at

__all__ = ["compile_script", "run_script"]


def compile_script(
    script: str,
    arguments: Sequence[str],
    topology: Topology,
    *,
    is_module: bool = False,
    step_name: str | None = None,
) -> Report:
    """Runs a script until it calls its step, and compiles the step instead.

    Args:
        script: Path of the script, or name of the module.
        arguments: Arguments of the script.
        topology: The devices to compile for.
        is_module: Whether `script` names a module.
        step_name: Name of the function that is the step; None for the first program that updates a
            trainable variable.

    Returns:
        A report on the compiled step.

    Raises:
        InvalidValueError: if there is no such script.
        CompileError: if the compiler refuses the step, the step needs more memory than a device
            has, or the script ends without a step.
        Exception: any exception of the script.
    """
    programs = Programs(topology, step_name)
    aim_at(Target(topology.name, topology.kind, topology.hosts, programs.wrap))
    try:
        run_script(script, arguments, is_module=is_module)
    except SystemExit as end:
        if programs.step is None and end.code not in (None, 0):
            raise
    finally:
        aim_at(None)
    if programs.step is None:
        raise CompileError(_without_a_step(script, programs, step_name))
    if isinstance(programs.step, CompileError):
        raise programs.step
    report = report_of(programs.step, topology)
    memory = report.memory
    if memory.total > memory.available:
        raise CompileError(
            f"{report.step} does not fit into the memory of {topology.name}: it needs"
            f" {memory.total / 2**30:.2f} GiB per device, and a program can use"
            f" {memory.available / 2**30:.2f} GiB. Take a smaller batch or model, a narrower dtype,"
            f" or more devices.\n{report.to_text()}"
        )
    return report


def run_script(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Runs a script as Python would, until it ends or raises `ScriptEnded`.

    Raises:
        InvalidValueError: if there is no such script.
        SystemExit, Exception: any exception of the script.
    """
    if not is_module and not Path(script).is_file():
        raise InvalidValueError(f"There is no script {script!r}.")
    with contextlib.suppress(ScriptEnded), _as_main(script, arguments, is_module):
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


def _without_a_step(script: str, programs: Programs, step_name: str | None) -> str:
    others = ", ".join(f"{name} ({count} x)" for name, count in programs.others.items())
    ran = f"it ran {others}" if others else "it ran no program under a strategy"
    if step_name is not None:
        return f"{script} never called a step {step_name!r}; {ran}."
    return (
        f"{script} ended without a training step, a program under a strategy that updates a"
        f" trainable variable; {ran}. Name another function with --step."
    )


@contextlib.contextmanager
def _as_main(script: str, arguments: Sequence[str], is_module: bool) -> Iterator[None]:
    """Runs the block with the `sys.argv` and `sys.path` of the script."""
    argv, path = sys.argv, sys.path
    folder = Path.cwd() if is_module else Path(script).resolve().parent
    sys.argv, sys.path = [script, *arguments], [str(folder), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
