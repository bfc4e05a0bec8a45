"""Measures the training step of a script while the script runs."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from distributary.devices import REPLICA_AXIS, Nest, ProgramKind, watch_programs
from distributary.engine import placed_struct_of
from distributary.errors import DistributaryError, InvalidValueError
from distributary.tools.compilation import (
    Script,
    ScriptEnded,
    StandIn,
    collectives_of_step,
    moved_activations,
    run_script,
)
from distributary.tools.diagnosis import all_reduce_seconds

_NUM_WARM_UP_STEPS = 3  # the first one compiles, and the next ones may allocate memory
_NUM_BLOCKS = 5
_NUM_REDUCTIONS = 20


@final
@dataclass(frozen=True)
class Timing:
    """The time that steps of a script take on some replicas of this machine.

    Args:
        step: Name of the step's function, or of the Keras method.
        platform: `"cpu"`, `"gpu"` or `"tpu"`.
        num_replicas: Number of replicas.
        block_seconds: Seconds per step, input and Python included, of several runs of steps.
        examples_per_step: Size of the global batch; None if unknown.
        num_reductions: Number of all-reduces in a step.
        reduced_bytes: Bytes that they reduce; reduce-scatters and all-gathers count half.
        reduction_seconds: Seconds that all-reduces of these sizes take alone.
        activations: The collectives that move activations, as text for people.
        efficiency: Examples per second and replica, divided by those with the smallest number of
            replicas that was measured; None if the batch size is unknown.
    """

    step: str
    platform: str
    num_replicas: int
    block_seconds: Sequence[float]
    examples_per_step: int | None
    num_reductions: int
    reduced_bytes: int
    reduction_seconds: float
    activations: Sequence[str]
    efficiency: float | None = None

    @property
    def seconds(self) -> float:
        """Median seconds per step."""
        return float(np.median(self.block_seconds))

    @property
    def examples_per_second(self) -> float | None:
        """Examples per second of all replicas together; None if the batch size is unknown."""
        examples = self.examples_per_step
        return None if examples is None else examples / self.seconds

    @property
    def communication(self) -> float:
        """Time of the all-reduces alone, divided by the time of the whole step."""
        return self.reduction_seconds / self.seconds


def time_script(script: Script, seconds: float) -> Timing:
    """Runs a script as the main program, and times its training step.

    Args:
        script: The script.
        seconds: Seconds for which to measure.

    Raises:
        SystemExit: with a text that says why there is no measurement, or by the script.
    """
    timer = StepTimer(seconds, script.step_name)
    watch_programs(timer.wrap)
    try:
        run_script(script)
        return timer.timing(script.path)
    except DistributaryError as error:
        sys.exit(str(error))


@final
class StepTimer:
    """A watcher of programs, see `watch_programs`, that ends the script after enough steps.

    Args:
        seconds: Seconds for which to measure.
        step_name: Name of the function that is the step; None for the first program that updates a
            trainable variable.
    """

    def __init__(self, seconds: float, step_name: str | None) -> None:
        self._block_limit_seconds = seconds / _NUM_BLOCKS
        self._step_name = step_name
        self._step: _Step | None = None
        self._num_warm = 0
        self._num_steps = 0  # in the current block
        self._start = 0.0
        self._blocks: list[float] = []

    def wrap(
        self, call: Callable[..., Any], mesh: jax.sharding.Mesh | None, kind: ProgramKind
    ) -> Callable[..., Any]:
        """Returns the function to call in place of a program."""
        if not kind.is_step(self._step_name):
            return call
        step = _Step(call, mesh, kind.name)
        return StandIn(partial(self._run, step), step.call.lower)

    def timing(self, script: str) -> Timing:
        """Returns the measurement; measures the all-reduces alone.

        Raises:
            InvalidValueError: if the script has taken too few steps.
        """
        step = self._step
        if step is None:
            what = "a training step" if self._step_name is None else repr(self._step_name)
            raise InvalidValueError(
                f"{script} ended without running {what} under a strategy. Strategies with parameter"
                " servers or central storage cannot be measured; --step names another function."
            )
        if not self._blocks:
            raise InvalidValueError(
                f"{script} ended after {self._num_warm + self._num_steps} steps. Let it train for"
                " longer, or measure for less time with --seconds."
            )
        mesh = step.mesh
        sizes: list[int] = []
        activations: list[str] = []
        reduction_seconds = 0.0
        if mesh is not None and mesh.size > 1:
            collectives = collectives_of_step(step.call.lower(*step.specs).compile())
            for collective in collectives:
                share = 1.0 if collective.kind == "all-reduce" else 0.5
                sizes += [round(share * collective.num_bytes)] * (collective.num_calls or 1)
            activations = moved_activations(collectives)
            if sizes:
                reduction_seconds = all_reduce_seconds(mesh, sizes, _NUM_REDUCTIONS)
        devices = jax.local_devices() if mesh is None else mesh.devices.flat
        num_replicas = 1 if mesh is None else mesh.shape[REPLICA_AXIS]
        return Timing(
            step=step.name,
            platform=devices[0].platform,
            num_replicas=num_replicas,
            block_seconds=self._blocks,
            examples_per_step=_num_examples(step.specs[-1], num_replicas),
            num_reductions=len(sizes),
            reduced_bytes=sum(sizes),
            reduction_seconds=reduction_seconds,
            activations=activations,
        )

    def _run(self, step: "_Step", *args: Nest) -> Nest:
        if self._step is None:
            self._step = step
            step.specs = jax.tree.map(placed_struct_of, args)  # the call donates the arguments
        result = step.call(*args)
        if self._step is not step:  # the same function, but for another shape
            return result
        if self._num_warm < _NUM_WARM_UP_STEPS:
            self._num_warm += 1
            self._begin_after(result)
            return result
        self._num_steps += 1
        if time.perf_counter() - self._start >= self._block_limit_seconds:
            num_steps = self._num_steps
            start, end = self._start, self._begin_after(result)
            self._blocks.append((end - start) / num_steps)
            if len(self._blocks) == _NUM_BLOCKS:
                raise ScriptEnded
        return result

    def _begin_after(self, result: Nest) -> float:
        """Starts a block once the devices have finished; returns the time of its start."""
        jax.block_until_ready(result)
        self._num_steps = 0
        self._start = time.perf_counter()
        return self._start


@final
@dataclass(eq=False)
class _Step:
    """The jitted function of a step, with the shapes of its first arguments."""

    call: Any
    mesh: jax.sharding.Mesh | None
    name: str
    specs: tuple[Nest, ...] = ()


def _num_examples(data: Nest, num_replicas: int) -> int | None:
    """Returns the size of the global batch in the arguments of a step; None if there is none."""
    for leaf in jax.tree.leaves(data):
        shape = np.shape(leaf)
        sharding = getattr(leaf, "sharding", None)
        if sharding is None and shape and num_replicas == 1:  # from Keras, on the host
            return shape[0]
        if sharding is None and shape[:1] == (num_replicas,) and len(shape) > 1:
            return num_replicas * shape[1]
        spec = getattr(sharding, "spec", None)
        if spec == P(REPLICA_AXIS) and len(shape) > 1:
            return num_replicas * shape[1]
    return None
