"""Updates of state that is kept in the host memory of the device that computes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax
from jax.extend.core import Jaxpr

from distributary.tracing import Array, Equation, aval_of, evaluate_all, variables_of

# This much state may come to the device before the results of earlier state have gone back.
_PART_BYTES = 1 << 26


@final
@dataclass(slots=True)
class _Part:
    """The equations that run between one transfer to the device and one back.

    Attributes:
        reads: State that these equations are the first to need.
        eqns: The equations.
        stores: New state that they make.
        num_bytes: Size of `reads`.
    """

    reads: list[Any] = field(default_factory=list)
    eqns: list[Any] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)
    num_bytes: int = 0


def update_in_parts(
    closed: Any, stored_inputs: Sequence[bool], stored_outputs: Sequence[bool]
) -> Callable[..., list[Array]]:
    """Makes a program that fetches state from host memory in parts, each put back before the next.

    Without this order, XLA fetches as much as there is room for. libtpu 0.0.42.1 fetches even more,
    and then fails because the device is out of memory.

    Args:
        closed: Closed jaxpr without side effects.
        stored_inputs: Whether each input is in host memory.
        stored_outputs: Whether each output is wanted there.

    Returns:
        A function from the inputs to the outputs, for `jax.jit`.
    """
    jaxpr = closed.jaxpr
    state = {v for v, stored in zip(jaxpr.invars, stored_inputs, strict=True) if stored}
    new = set(variables_of(v for v, s in zip(jaxpr.outvars, stored_outputs, strict=True) if s))
    parts = _parts(_in_order_of_outputs(jaxpr), state, new)

    def run(*values: Array) -> list[Array]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *values], strict=True))
        kept: dict[Any, Array] = {}
        gone: list[Array] = []
        for part in parts:
            arriving = [known[v] for v in part.reads]
            if gone and arriving:
                arriving, _ = jax.lax.optimization_barrier((arriving, gone))
            known.update(
                zip(part.reads, jax.device_put(arriving, jax.memory.Space.Device), strict=True)
            )
            evaluate_all(part.eqns, known)
            gone = jax.device_put([known[v] for v in part.stores], jax.memory.Space.Host)
            kept.update(zip(part.stores, gone, strict=True))

        def output(atom: Any, stored: bool) -> Array:
            if not variables_of([atom]):
                value = jax.numpy.asarray(atom.val, atom.aval.dtype)
            elif stored and atom in kept:
                return kept[atom]
            else:
                value = known[atom]
            return jax.device_put(
                value, jax.memory.Space.Host if stored else jax.memory.Space.Device
            )

        return list(map(output, jaxpr.outvars, stored_outputs))

    return run


def _parts(eqns: Sequence[Any], state: set[Any], new: set[Any]) -> list[_Part]:
    parts = [_Part()]
    seen: set[Any] = set()
    for eqn in eqns:
        reads = [v for v in dict.fromkeys(variables_of(eqn.invars)) if v in state and v not in seen]
        part = parts[-1]
        if reads and part.stores and part.num_bytes >= _PART_BYTES:
            part = _Part()
            parts.append(part)
        seen.update(reads)
        part.reads += reads
        part.num_bytes += sum(v.size * v.dtype.itemsize for v in map(aval_of, reads))
        part.eqns.append(eqn)
        part.stores += [v for v in eqn.outvars if v in new]
    return parts


def _in_order_of_outputs(jaxpr: Jaxpr) -> list[Equation]:
    """Returns the equations that the outputs need, those of the first output first."""
    made_by = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    order: dict[int, None] = {}
    for output in jaxpr.outvars:
        positions: set[int] = set()
        needed = variables_of([output])
        while needed:
            i = made_by.get(needed.pop())
            if i is not None and i not in order and i not in positions:
                positions.add(i)
                needed += variables_of(jaxpr.eqns[i].invars)
        order.update(dict.fromkeys(sorted(positions)))
    return [jaxpr.eqns[i] for i in order]
