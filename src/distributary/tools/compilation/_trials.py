"""Compiles variations of a script's step, each in a process of its own.

There, the names of layers and the state of the script are those of its first run, and memory is
free again afterwards.
"""

import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp

from distributary.context import get_strategy
from distributary.devices import Nest, Trial, without_memory
from distributary.errors import CompileError, UnsupportedError
from distributary.tools.compilation._report import Report
from distributary.tools.compilation._script import DoesNotFitError, Script, compile_script
from distributary.tools.compilation._topologies import parse_topology, prepare_compilers

_PROGRAM = "from distributary.tools.compilation import answer_call; answer_call()"


def call_in_process(
    function: Callable[..., Any], *args: object, environ: Mapping[str, str], stderr: int
) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """Calls a function in another process.

    Args:
        function: A function of a module.
        *args: Its arguments.
        environ: Environment of the process.
        stderr: Where the process writes errors, as in `subprocess.run`.

    Returns:
        The result, None if the process has failed; and the process with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        call, answer = Path(folder) / "call", Path(folder) / "answer"
        call.write_bytes(pickle.dumps((function, args)))
        process = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(call), str(answer)],
            env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
        )
        has_ended_well = process.returncode == 0 and answer.exists()
        return pickle.loads(answer.read_bytes()) if has_ended_well else None, process


def answer_call() -> None:
    """Makes the call in one file, and writes the result to another; both are arguments."""
    call, answer = map(Path, sys.argv[1:])
    function, args = pickle.loads(call.read_bytes())
    answer.write_bytes(pickle.dumps(function(*args)))


@final
@dataclass(frozen=True)
class Variation:
    """A variation of a script's step.

    Args:
        topology: Name of the devices.
        arguments: Arguments of the strategy, in place of the script's.
        rematerializes: Whether the backward pass computes the inside of blocks once more. Blocks
            are layers of the model that contain layers.
        num_rows: Rows of a batch of `fit`, in place of the script's; None keeps these.
    """

    topology: str
    arguments: Mapping[str, object]
    rematerializes: bool = False
    num_rows: int | None = None


@final
@dataclass
class Outcome:
    """The compiler's result for a variation.

    Attributes:
        fits: Whether the step fits into the memory of a device.
        report: The report; None if the compiler has refused the step, or was not asked.
        state_bytes: Size of the state on one device if that is too large by itself, else 0.
        failure: Why the variation cannot be made; empty if it can.
        strategy: Name of the class of the model's strategy.
        num_rows: Rows of a batch of `fit`; None if the step is not that of `fit`.
        blocks: By an expression for the model that contains them, the names of its blocks.
    """

    fits: bool = False
    report: Report | None = None
    state_bytes: int = 0
    failure: str = ""
    strategy: str = ""
    num_rows: int | None = None
    blocks: dict[str, list[str]] | None = None


def outcome_of(script: Script, variation: Variation) -> Outcome:
    """Compiles a variation in another process.

    Raises:
        CompileError: if the script fails, or its step cannot be compiled for the topology.
    """
    outcome, process = call_in_process(
        _outcome_or_error, script, variation, environ=os.environ, stderr=subprocess.PIPE
    )
    if isinstance(outcome, Exception):
        raise outcome
    if not isinstance(outcome, Outcome):
        raise CompileError(f"{script.path} failed with {variation}. It says:\n{process.stderr}")
    return outcome


def _outcome_or_error(script: Script, variation: Variation) -> Outcome | CompileError:
    prepare_compilers()
    try:
        return _compiled(script, variation)
    except CompileError as error:
        return error


def _compiled(script: Script, variation: Variation) -> Outcome:
    outcome = Outcome()

    def prepare(model: Any, batch: Nest, dim: int) -> Nest:
        outcome.strategy = type(get_strategy()).__name__
        if variation.rematerializes and outcome.blocks is None:
            outcome.blocks = _rematerialize(model)
        size = variation.num_rows
        if size is not None:
            batch = jax.tree.map(lambda leaf: _resized(leaf, dim, size), batch)
        outcome.num_rows = next(x.shape[dim] for x in jax.tree.leaves(batch) if x.ndim > dim)
        return batch

    try:
        outcome.report = compile_script(
            script.path,
            script.arguments,
            parse_topology(variation.topology),
            is_module=script.is_module,
            step_name=script.step_name,
            trial=Trial(variation.arguments, prepare),
        )
        outcome.fits = True
    except DoesNotFitError as error:
        outcome.report, outcome.state_bytes = error.report, error.state_bytes
    except Exception as error:
        if not variation.rematerializes:
            raise
        outcome.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    if variation.rematerializes and outcome.blocks is None and not outcome.failure:
        outcome.fits, outcome.failure = False, "only layers of models in fit are rematerialized"
    return outcome


def _resized(leaf: Any, dim: int, size: int) -> Any:
    """Returns an array with another number of rows; only its shape matters."""
    if leaf.ndim <= dim:
        return leaf
    shape = (*leaf.shape[:dim], size, *leaf.shape[dim + 1 :])
    zeros = without_memory(shape, leaf.dtype)
    return jnp.zeros(shape, leaf.dtype) if zeros is None else zeros


def _rematerialize(model: Any) -> dict[str, list[str]]:
    """Makes the blocks of a model compute what is inside of them once more; returns these.

    Raises:
        UnsupportedError: if no layer contains others.
    """
    names: dict[str, list[str]] = {}
    for text, block in _blocks(model, "model"):
        names.setdefault(text, []).append(block.name)
        block.call = _rematerialized(block.call)
    if not names:
        raise UnsupportedError("no layer of the model contains layers, which would be a block")
    return names


def _blocks(model: Any, text: str) -> Iterator[tuple[str, Any]]:
    for layer in model.layers:
        if hasattr(layer, "layers"):
            yield from _blocks(layer, f"{text}.get_layer({layer.name!r})")
        elif layer._layers:
            yield text, layer


def _rematerialized(call: Callable[..., Any]) -> Callable[..., Any]:
    # What has a name may be a Python value, such as `training`, which must not be traced.
    return lambda *args, **kwargs: jax.checkpoint(functools.partial(call, **kwargs))(*args)
