"""Compares layouts of a script's variables by what the compiler makes of its step with each."""

import functools
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp

from distributary.context import get_strategy
from distributary.devices import Nest, Trial, without_memory
from distributary.engine import format_bytes as _size, total_bytes
from distributary.errors import CompileError, InvalidValueError, UnsupportedError
from distributary.tools.compilation._report import Report
from distributary.tools.compilation._script import (
    DoesNotFitError,
    Script,
    call_in_process,
    compile_script,
)
from distributary.tools.compilation._topologies import Topology, parse_topology, prepare_compilers

# Variations of a script's step, each compiled in a process of its own.
#
# There, the names of layers and the state of the script are those of its first run, and memory is
# free again afterwards.


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


# Layouts of variables, compared.

# Arguments that are not those of a layout have these values, whatever the script says.
_WHOLE: Mapping[str, object] = {
    "experimental_shard_optimizer_state": False,
    "experimental_shard_parameters": False,
    "experimental_model_parallel": None,
}
# The arguments of strategies that give each layout. A strategy that lacks one ignores it.
_LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "mirrored": {},
    "sharded optimizer state": {"experimental_shard_optimizer_state": True},
    "sharded parameters": {"experimental_shard_parameters": True},
    "sharded in each host": {"experimental_shard_parameters": "host"},
    "layers over 2 devices": {"experimental_model_parallel": 2},
    "layers and parameters": {
        "experimental_model_parallel": 2,
        "experimental_shard_parameters": True,
    },
}
_MOST_DOUBLINGS = 8


@final
@dataclass(frozen=True)
class Row:
    """A layout, with or without rematerialization.

    Args:
        layout: Name of the layout.
        arguments: Arguments of the strategy that give it.
        rematerializes: Whether the backward pass computes the inside of blocks once more.
        outcome: Result for the script's batch.
        largest_batch: Largest batch of the search that fits: a power of two rows per replica. 0 if
            none does; None if the batch of the script cannot be changed or was not searched.
        is_largest: Whether twice as many rows do not fit; False if that was not searched.
    """

    layout: str
    arguments: Mapping[str, object]
    rematerializes: bool
    outcome: Outcome
    largest_batch: int | None = None
    is_largest: bool = True

    @property
    def moved_bytes(self) -> int:
        """Size of the arrays that a step sends through collectives; a loop may count once."""
        report = self.outcome.report
        return 0 if report is None else total_bytes(report.collectives)

    def cells(self, available: int) -> list[str]:
        """Returns the row of a table for people."""
        outcome, report = self.outcome, self.outcome.report
        first = [self.layout, "yes" if self.rematerializes else "no"]
        if outcome.failure:
            return [*first, outcome.failure]
        fits = "yes" if outcome.fits else "no"
        if report is None:
            what = f"{_size(outcome.state_bytes)} of state" if outcome.state_bytes else ""
            return [*first, what or f"more than {_size(available)}", fits, self._batch()]
        memory = report.memory
        sums = [c for c in report.collectives if c.role == "sum"]
        early = sum(c.num_bytes * c.num_early for c in sums)
        beside = total_bytes(c for c in report.collectives if c.is_async)
        in_a_loop = any(c.num_calls is None for c in report.collectives)
        return [
            *first,
            f"{_size(memory.total)} ({_size(memory.arguments)} + {_size(memory.temporaries)})",
            fits,
            self._batch(),
            f"{'at least ' if in_a_loop else ''}{_size(self.moved_bytes)}",
            _percent(beside, self.moved_bytes),
            _percent(early, total_bytes(sums)),
        ]

    def _batch(self) -> str:
        if self.largest_batch is None:
            return "-"
        return f"{'' if self.is_largest else 'at least '}{self.largest_batch or 'none'}"


@final
@dataclass(frozen=True)
class Plan:
    """What the layouts of a script's variables need on a topology.

    Args:
        topology: Name of the topology.
        device_kind: Name of the devices.
        num_devices: Number of devices.
        num_hosts: Number of their hosts.
        memory_bytes: Memory of a device that a program can use.
        rows: The layouts.
    """

    topology: str
    device_kind: str
    num_devices: int
    num_hosts: int
    memory_bytes: int
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row | None:
        """The row that moves the fewest bytes of those that fit, without recomputing if it can."""
        fitting = [row for row in self.rows if row.outcome.fits]
        key = lambda row: (row.moved_bytes, row.rematerializes)
        return min(fitting, key=key, default=None)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as numbers, strings, lists and dicts."""
        rows = [{**asdict(row), "moved_bytes": row.moved_bytes} for row in self.rows]
        return {**asdict(self), "rows": rows, "code": self._code()}

    def to_text(self) -> str:
        """Returns the plan as text for people."""
        outcome = self.rows[0].outcome
        batch = next((row.outcome.num_rows for row in self.rows if row.outcome.num_rows), None)
        title = (
            f"{self.topology}: {self.num_devices} x {self.device_kind},"
            f" {_size(self.memory_bytes)} each"
        )
        of_batch = "the batch of its loop" if batch is None else f"batches of {batch}"
        head = ["layout", "remat", "memory (arguments + temporaries)", "fits", "largest batch"]
        table = [
            [*head, "moved per step", "beside computations", "sums before backward ends"],
            *(row.cells(self.memory_bytes) for row in self.rows),
        ]
        widths = [max(len(r[i]) for r in table if i < len(r)) for i in range(len(table[0]))]
        widths[2] = max(len(r[2]) for r in table if len(r) != 3)  # reasons may be longer
        lines = ["  ".join(map(str.ljust, r, widths)).rstrip() for r in table]
        step = "" if outcome.report is None else f"{outcome.report.step}, "
        below = [f"{step}{of_batch}", "", *lines, "", *self._end()]
        return "\n".join([title, *(f"  {line}".rstrip() for line in below)])

    def _end(self) -> list[str]:
        code = self._code()
        if code:
            return ["Of those that fit, this moves the fewest bytes:", "", *code]
        rows = [row for row in self.rows if row.largest_batch]
        if not rows:
            return ["Nothing fits: take more devices, a smaller model or a narrower dtype."]
        most = max(rows, key=lambda row: row.largest_batch or 0)
        remat = " with rematerialization" if most.rematerializes else ""
        largest = f"The largest batch that does is {most.largest_batch}, {most.layout}{remat}."
        return [f"Nothing fits with this batch. {largest}"]

    def _code(self) -> list[str]:
        """Returns the lines of code for the best row; none if nothing fits."""
        best = self.best
        if best is None:
            return []
        arguments = ", ".join(f"{name}={value!r}" for name, value in best.arguments.items())
        strategy = best.outcome.strategy or "MirroredStrategy"
        if strategy == "MirroredStrategy" and self.num_hosts > 1:
            strategy = "MultiWorkerMirroredStrategy"
        lines = [f"strategy = dist.{strategy}({arguments})"]
        if best.rematerializes:
            lines += _REMATERIALIZED
            for model, names in (best.outcome.blocks or {}).items():
                lines += [f"for name in {names}:", f"    rematerialize({model}.get_layer(name))"]
        return [f"    {line}" for line in lines]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


_REMATERIALIZED = """import functools, jax

def rematerialize(layer):
    call = layer.call
    layer.call = lambda *a, **k: jax.checkpoint(functools.partial(call, **k))(*a)

""".splitlines()


def plan_script(
    script: Script,
    topologies: Sequence[str],
    num_processes: int,
    layouts: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Plan]:
    """Compiles the step of a script with several layouts, for several topologies.

    The largest batch is searched for the best layout of a topology; if nothing fits, or if you name
    layouts, for each of them.

    Args:
        script: The script.
        topologies: Names of the devices.
        num_processes: Number of compilations at the same time.
        layouts: Names of the layouts; None for all that differ on a topology.
        tell: Gets a line of text for people after each compilation.

    Raises:
        InvalidValueError: for a topology or layout that does not exist.
        CompileError: if the script fails, or its step cannot be compiled.
    """
    searches = [_Search(script, parse_topology(name), tell) for name in topologies]
    for layout in layouts or ():
        if layout not in _LAYOUTS:
            known = ", ".join(map(repr, _LAYOUTS))
            raise InvalidValueError(f"distributary plan: no layout {layout!r}, expected {known}.")
    with ThreadPoolExecutor(num_processes) as pool:

        def rows_of(search: _Search, layout: str) -> tuple[Row, Future[Row]]:
            plain = search.row(layout, False)
            # Rematerialization does not change the state.
            same = plain.outcome if plain.outcome.state_bytes else None
            return plain, pool.submit(search.row, layout, True, same)

        started = [
            [pool.submit(rows_of, one, layout) for layout in layouts or _layouts_for(one.topology)]
            for one in searches
        ]
        try:
            searched = []
            for search, futures in zip(searches, started, strict=True):
                both = [future.result() for future in futures]
                rows = [row for plain, again in both for row in (plain, again.result())]
                best = None if layouts else search.plan(rows).best
                only = None if best is None else best.layout
                searched.append([pool.submit(search.with_largest, row, only) for row in rows])
            return [
                search.plan([row.result() for row in futures])
                for search, futures in zip(searches, searched, strict=True)
            ]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _layouts_for(topology: Topology) -> list[str]:
    """Returns the layouts that differ on a topology."""
    # On one host, its devices are all devices.
    same = "sharded in each host" if len(topology.hosts) == 1 else None
    return [name for name in _LAYOUTS if name != same]


@final
@dataclass(frozen=True)
class _Search:
    """The search for layouts that fit on a topology, and for the largest batches that do."""

    script: Script
    topology: Topology
    tell: Callable[[str], None]

    def plan(self, rows: Sequence[Row]) -> Plan:
        """Returns the plan with some rows."""
        hosts, name = self.topology.hosts, self.topology.name
        counts = sum(map(len, hosts)), len(hosts)
        kind = hosts[0][0].device_kind
        return Plan(name, kind, *counts, self.topology.memory_bytes, tuple(rows))

    def row(self, layout: str, rematerializes: bool, known: Outcome | None = None) -> Row:
        """Compiles the step with the script's batch, unless the outcome is known."""
        first = known or self._outcome(layout, rematerializes)
        largest = 0 if first.state_bytes else first.num_rows if first.fits else None
        return Row(layout, _LAYOUTS[layout], rematerializes, first, largest, largest == 0)

    def with_largest(self, row: Row, only: str | None) -> Row:
        """Compiles the step with as many batches as the search for the largest needs.

        Args:
            row: The row to which it adds the result.
            only: The layout for which to search; None for any.
        """
        if only not in (None, row.layout):
            return row
        largest, is_largest = self._largest(row)
        return replace(row, largest_batch=largest, is_largest=is_largest)

    def _outcome(self, layout: str, rematerializes: bool, num_rows: int | None = None) -> Outcome:
        """Compiles the step for a batch; None takes the script's."""
        own = _LAYOUTS[layout]
        # The script's rules are for layers that are divided.
        rules = {} if "experimental_model_parallel" in own else {"experimental_layout_map": None}
        arguments = {**_WHOLE, **rules, **own}
        variation = Variation(self.topology.name, arguments, rematerializes, num_rows)
        outcome = outcome_of(self.script, variation)
        remat = ", rematerialized" if rematerializes else ""
        batch = "" if outcome.num_rows is None else f", batch {outcome.num_rows}"
        fits = outcome.failure or ("fits" if outcome.fits else "does not fit")
        self.tell(f"{self.topology.name}: {layout}{remat}{batch}: {fits}")
        return outcome

    def _largest(self, row: Row) -> tuple[int | None, bool]:
        """Returns the largest batch that fits, and whether twice as much does not."""
        first = row.outcome
        if first.failure or first.num_rows is None:
            return None, True
        if first.state_bytes:
            return 0, True
        # Of a step that was refused, the strategy may have fewer; that moves the sizes only.
        report, devices = first.report, sum(map(len, self.topology.hosts))
        num_replicas = devices if report is None else report.num_replicas
        start = int(math.log2(max(1, first.num_rows // num_replicas)))
        known = {start: first} if first.num_rows == num_replicas << start else {}
        totals = {first.num_rows: first.report.memory} if first.report else {}
        lower, upper = -1, start + _MOST_DOUBLINGS
        k = start
        while lower + 1 < upper:
            k = min(max(k, lower + 1), upper - 1)
            outcome = known.get(k) or self._outcome(
                row.layout, row.rematerializes, num_replicas << k
            )
            if outcome.report is not None:
                totals[num_replicas << k] = outcome.report.memory
            lower, upper = (k, upper) if outcome.fits else (lower, k)
            k = _guess(totals, num_replicas) if totals else upper - 1
        return (num_replicas << lower if lower >= 0 else 0), upper < start + _MOST_DOUBLINGS


def _guess(totals: Mapping[int, Any], num_replicas: int) -> int:
    """Returns where the largest batch that fits may be, as a power of two rows per replica."""
    *before, (num_rows, memory) = sorted(totals.items())
    slope = (memory.total - memory.arguments) / num_rows
    if before and memory.total > before[-1][1].total:
        slope = (memory.total - before[-1][1].total) / (num_rows - before[-1][0])
    most = num_rows + (memory.available - memory.total) / max(slope, 1)
    return int(math.log2(max(1, most / num_replicas)))
