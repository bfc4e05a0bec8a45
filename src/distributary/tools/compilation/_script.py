"""Runs a script up to its training step, and compiles the step for another machine."""

import contextlib
import math
import os
import pickle
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, final

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import (
    REPLICA_AXIS,
    Nest,
    ProgramKind,
    Target,
    Trial,
    mesh_of_values,
    shard_dim,
    sharding_on,
    stored_shape,
    watch_programs,
)
from distributary.errors import CompileError, InvalidValueError, UnsupportedError
from distributary.jaxprs import (
    AnyJaxpr,
    Equation,
    evaluate_one,
    has_replicas,
    interpret_with,
    plain_call_of,
)
from distributary.programs import evaluate_jointly
from distributary.tools.compilation._report import Report, report_of
from distributary.tools.compilation._topologies import Topology


@final
@dataclass(frozen=True)
class Script:
    """A script that trains.

    Args:
        path: Path of the script, or name of the module.
        arguments: Arguments of the script.
        is_module: Whether `path` names a module.
        step_name: Name of the function that is the step; None for the first program that updates a
            trainable variable.
    """

    path: str
    arguments: Sequence[str]
    is_module: bool = False
    step_name: str | None = None


def compile_script(
    script: str,
    arguments: Sequence[str],
    topology: Topology,
    *,
    is_module: bool = False,
    step_name: str | None = None,
    trial: Trial | None = None,
) -> Report:
    """Runs a script until it calls its step, and compiles the step instead.

    Of a trial, a step whose state alone is too large is not compiled.

    Args:
        script: Path of the script, or name of the module.
        arguments: Arguments of the script.
        topology: The devices to compile for.
        is_module: Whether `script` names a module.
        step_name: Name of the function that is the step; None for the first program that updates a
            trainable variable.
        trial: What is changed in the script; None leaves it as it is.

    Returns:
        A report on the compiled step.

    Raises:
        InvalidValueError: if there is no such script.
        DoesNotFitError: if the step needs more memory than a device has.
        CompileError: if the compiler refuses the step, or the script ends without a step.
        Exception: any exception of the script.
    """
    programs = Programs(topology, step_name, is_trial=trial is not None)
    watch_programs(programs.wrap, Target(topology.name, topology.kind, topology.hosts, trial))
    try:
        run_script(Script(script, arguments, is_module))
    except SystemExit as end:
        if programs.step is None and end.code not in (None, 0):
            raise
    finally:
        watch_programs(None)
    if programs.step is None:
        raise CompileError(_without_a_step(script, programs))
    if isinstance(programs.step, CompileError):
        raise programs.step
    report = programs.step
    memory = report.memory
    if memory.total > memory.available:
        raise DoesNotFitError(
            f"{report.step} does not fit into the memory of {topology.name}: it needs"
            f" {memory.total / 2**30:.2f} GiB per device, and a program can use"
            f" {memory.available / 2**30:.2f} GiB. Take a smaller batch or model, a narrower dtype,"
            f" or more devices.\n{report.to_text()}",
            report,
        )
    return report


@final
class DoesNotFitError(CompileError):
    """Raised for a step that needs more memory than a device has.

    Attributes:
        report: What is known about the step; None if the compiler has refused it.
        state_bytes: Size of the state on one device if that is too large by itself, else 0.
    """

    def __init__(self, text: str, report: Report | None = None, state_bytes: int = 0) -> None:
        super().__init__(text)
        self.report = report
        self.state_bytes = state_bytes


def run_script(script: Script) -> None:
    """Runs a script as Python would, until it ends or raises `ScriptEnded`.

    Raises:
        InvalidValueError: if there is no such script.
        SystemExit, Exception: any exception of the script.
    """
    if not script.is_module and not Path(script.path).is_file():
        raise InvalidValueError(f"There is no script {script.path!r}.")
    with contextlib.suppress(ScriptEnded), _as_main(script):
        if script.is_module:
            runpy.run_module(script.path, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script.path, run_name="__main__")


@final
class ScriptEnded(BaseException):
    """Ends a script at its step, which cannot run here.

    It is not an `Exception`, so that a script that catches those ends as well.
    """


@final
@dataclass(eq=False)
class Programs:
    """The programs of one script.

    Args:
        topology: The devices to compile for.
        step_name: Name of the function that is the step; None for the first program that updates a
            trainable variable.
        is_trial: Whether a step whose state alone is too large is not compiled.

    Attributes:
        step: A report on the compiled step, or the error if it cannot be compiled; None before the
            step.
        others: Names of the programs that ran here, and how often each of them ran.
    """

    topology: Topology
    step_name: str | None = None
    is_trial: bool = False
    step: Report | CompileError | None = None
    others: Counter[str] = field(default_factory=Counter)

    def wrap(self, call: Any, mesh: Mesh | None, kind: ProgramKind) -> Any:
        """Returns the function to call in place of a jitted function for `mesh`."""
        if mesh is None:  # it runs on the device of the values, in any case
            return call

        def lower(*args: Any) -> Any:
            return call.lower(*_avals(args, mesh))

        if kind.is_step(self.step_name):
            return StandIn(lambda *args: self._end_with(kind.name, call, mesh, args), lower)
        here = OneDeviceProgram(call, mesh_of_values(mesh))

        def run_here(*args: Any) -> Any:
            self.others[kind.name] += 1
            return here(*args)

        return StandIn(run_here, lower)

    def _end_with(self, name: str, call: object, mesh: Mesh, args: Nest) -> NoReturn:
        if self.step is None:
            self.step = self._compiled(name, call, mesh, _avals(args, mesh))
        raise ScriptEnded

    def _compiled(self, name: str, call: Any, mesh: Mesh, avals: Nest) -> Report | CompileError:
        try:
            start = time.perf_counter()
            lowered = call.lower(*avals)
            lowered_at = time.perf_counter()
            state = _donated_bytes(lowered, avals)
            if self.is_trial and sum(state) > self.topology.memory_bytes:
                return DoesNotFitError(
                    f"The state of {name} alone needs {sum(state) / 2**30:.2f} GiB per device.",
                    state_bytes=sum(state),
                )
            executable = lowered.compile()
            compiled_at = time.perf_counter()
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            explained = _explained(error, name, mesh.size, self.topology)
            if explained is None:
                raise
            return explained
        seconds = lowered_at - start, compiled_at - lowered_at
        return report_of(self.topology, name, mesh, executable, state, *seconds)


@final
@dataclass(frozen=True)
class StandIn:
    """A stand-in for a jitted function.

    Args:
        run: Function to call instead.
        lower: Returns the jitted function lowered for arguments.
    """

    run: Callable[..., Nest]
    lower: Callable[..., jax.stages.Lowered]

    def __call__(self, *args: Nest) -> Nest:
        return self.run(*args)


def _avals(args: Nest, mesh: Mesh) -> Nest:
    """Returns the arguments of a program with the placement they would have on `mesh`."""
    none_placed = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(args))

    def aval(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        sharding, shape = None, jnp.shape(leaf)
        if isinstance(leaf, jax.Array):
            here = leaf.sharding
            sharding = sharding_on(mesh, here.spec if isinstance(here, NamedSharding) else P())
            shape = stored_shape(shape, sharding)
        elif none_placed:  # at least one argument must name the devices
            sharding = NamedSharding(mesh, P())
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(aval, args)


def _donated_bytes(lowered: jax.stages.Lowered, avals: Nest) -> list[int]:
    """Returns the size on one device of each array that a program updates in place."""
    infos = jax.tree.leaves(lowered.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    leaves = zip(jax.tree.leaves(avals), infos, strict=True)
    return [_bytes_on_a_device(aval) for aval, info in leaves if info.donated]


def _bytes_on_a_device(aval: jax.ShapeDtypeStruct) -> int:
    shape = aval.shape if aval.sharding is None else aval.sharding.shard_shape(aval.shape)
    return math.prod(shape) * aval.dtype.itemsize


def _explained(
    error: Exception, name: str, num_used: int, topology: Topology
) -> CompileError | None:
    """Returns an error that explains a compiler's refusal; None if `error` is not a refusal."""
    text = str(error)
    missing = re.search(r"rule for primitive '(\w+)' not found for platform", text)
    if missing is not None:
        return CompileError(
            f"{name} uses {missing[1]!r}, which XLA does not have on a {topology.kind}. Compute it"
            " another way, or outside of the step."
        )
    if "RESOURCE_EXHAUSTED" in text:
        return DoesNotFitError(
            f"{name} does not fit into the memory of {topology.name}. The compiler says:"
            f" {_beginning(text)}\nTake a smaller batch or model, a narrower dtype, or more"
            " devices."
        )
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    num_devices = sum(map(len, topology.hosts))
    if topology.kind == "TPU" and num_used < num_devices:
        return CompileError(
            f"{name} is for {num_used} of the {num_devices} devices of {topology.name}, and the"
            " chips of a TPU slice run programs only together. MirroredStrategy takes one host of"
            f" {len(topology.hosts)}; use TPUStrategy, or a smaller topology."
        )
    return CompileError(
        f"{name} cannot be compiled for {topology.name}. The compiler says: {_beginning(text)}"
    )


def _beginning(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n  ".join(lines[:12] if len(lines) <= 12 else [*lines[:12], "..."])


def _without_a_step(script: str, programs: Programs) -> str:
    others = ", ".join(f"{name} ({count} x)" for name, count in programs.others.items())
    ran = f"it ran {others}" if others else "it ran no program under a strategy"
    if programs.step_name is not None:
        return f"{script} never called a step {programs.step_name!r}; {ran}."
    return (
        f"{script} ended without a training step, a program under a strategy that updates a"
        f" trainable variable; {ran}. Name another function with --step."
    )


@contextlib.contextmanager
def _as_main(script: Script) -> Iterator[None]:
    """Runs the block with the `sys.argv` and `sys.path` of the script."""
    argv, path = sys.argv, sys.path
    folder = Path.cwd() if script.is_module else Path(script.path).resolve().parent
    sys.argv, sys.path = [script.path, *script.arguments], [str(folder), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


# Calls in another process, in which a script may run.

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


# Runs programs of many replicas on one device.
#
# Every `shard_map` is replaced by all replicas side by side. With two replicas
#
#     { lambda ; w:f32[] x:f32[4]. let
#         d:f32[] = shard_map[in_specs=(P(), P("replica")) out_specs=(P(),)
#           jaxpr={ lambda ; e:f32[] f:f32[2]. let
#               g:f32[2] = mul f e
#               h:f32[] = reduce_sum g
#               i:f32[] = psum[replica] h
#             in (i,) }
#         ] w x
#       in (d,) }
#
# is evaluated as
#
#     { lambda ; w:f32[] x:f32[4]. let
#         d:f32[2] e:f32[2] = split[axis=0 sizes=(2, 2)] x
#         f:f32[2] = mul d w
#         g:f32[] = reduce_sum f
#         h:f32[2] = mul e w
#         i:f32[] = reduce_sum h
#         j:f32[] = add g i
#       in (j,) }


@final
class OneDeviceProgram:
    """A jitted function that is written for a mesh, run so that it computes the same on one device.

    Args:
        call: The jitted function.
        mesh: A mesh of one device, with the axes of the function's mesh.
    """

    def __init__(self, call: Callable[..., Nest], mesh: Mesh) -> None:
        self._call = call
        self._mesh = mesh
        self._programs: dict[Hashable, tuple[Callable[..., list[Array]], list[P], Any]] = {}

    def __call__(self, *args: Nest) -> Nest:
        """Runs it on arrays that lie on the mesh, and donates none of them.

        Raises:
            UnsupportedError: for replicas inside `jax.lax.scan`, `cond` and `while_loop`.
            ReplicaMismatchError: if the replicas disagree on a collective.
        """
        # The equations name the function's mesh, so arrays must not name the one of one device.
        leaves, tree = jax.tree.flatten(args)
        leaves = [x.addressable_data(0) if isinstance(x, jax.Array) else x for x in leaves]
        key = tree, tuple([(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves])
        if key not in self._programs:
            closed, shapes = jax.make_jaxpr(self._call, return_shape=True)(
                *jax.tree.unflatten(tree, leaves)
            )
            specs: list[P] = []

            def run(leaves: list[Array]) -> list[Array]:
                outs, specs[:] = _evaluate(closed, leaves)
                return outs

            self._programs[key] = jax.jit(run), specs, jax.tree.structure(shapes)
        program, specs, out_tree = self._programs[key]
        outs = program(leaves)
        shardings = [NamedSharding(self._mesh, spec) for spec in specs]
        return jax.tree.unflatten(out_tree, jax.device_put(outs, shardings))


def _evaluate(jaxpr: AnyJaxpr, args: Sequence[Array]) -> tuple[list[Array], list[P]]:
    """Returns the outputs of a program, and the `PartitionSpec` that each has on the mesh."""
    whole = lambda x: (x, P())
    outs, _ = interpret_with(jaxpr, map(whole, args), whole, _results_with_specs)
    return [x for x, _ in outs], [spec for _, spec in outs]


def _results_with_specs(
    eqn: Equation, operands: Sequence[tuple[Array, P]]
) -> Iterable[tuple[Array, P]]:
    values = [x for x, _ in operands]
    name = eqn.primitive.name
    specs: Sequence[P] = [P()] * len(eqn.outvars)
    if name == "shard_map":
        outs, specs = _all_replicas(eqn, values), eqn.params["out_specs"]
    elif name == "sharding_constraint":
        outs, specs = values, [eqn.params["sharding"].spec]
    elif (called := plain_call_of(eqn)) is not None:
        outs, specs = _evaluate(called, values)
    elif has_replicas([eqn]):
        raise UnsupportedError(
            f"Strategy.run inside jax.lax.{name} cannot be run on one device in the place of"
            " many. Call it outside of the loop or branch."
        )
    else:
        outs = evaluate_one(eqn, values)
    return zip(outs, specs, strict=True)


def _all_replicas(eqn: Equation, operands: list[Array]) -> list[Array]:
    num_replicas = eqn.params["mesh"].shape[REPLICA_AXIS]
    parts = []
    for operand, spec in zip(operands, eqn.params["in_specs"], strict=True):
        dim = shard_dim(spec)
        whole = [operand] * num_replicas
        parts.append(whole if dim is None else jnp.split(operand, num_replicas, dim))
    inputs = list(map(list, zip(*parts, strict=True))) or [[] for _ in range(num_replicas)]
    outs = evaluate_jointly([eqn.params["jaxpr"]] * num_replicas, inputs)
    results = []
    for column, spec in zip(zip(*outs, strict=True), eqn.params["out_specs"], strict=True):
        dim = shard_dim(spec)
        results.append(column[0] if dim is None else jnp.concatenate(column, dim))
    return results
