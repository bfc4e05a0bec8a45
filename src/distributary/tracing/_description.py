"""Describes a program as lines of text that are the same in every process that traces it.

`x @ w` gives

    v0 = input float32[4,3]
    v1 = input float32[3,3]
    v2 = dot_general v0 v1 dimension_numbers=(((1), (0)), ((), ())) ... : float32[4,3]
    results v2 : float32[4,3]

The lines have no addresses, counters of this process or places of constants in memory. Constants
are described by their bytes, where they are used first.

What nothing needs has no lines. Python code can read a constant for its shape alone, for example.
JAX drops it if Python has freed it when the trace ends. If it waits for the garbage collector, it
stays, on one worker and not on the other.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.typing import ArrayLike

from distributary.jaxprs import (
    AnyJaxpr,
    Atom,
    Equation,
    leading_to,
    open_jaxpr,
    place_of,
    variables_of,
    walk,
)
from distributary.tracing._divergence import is_collective
from distributary.tracing._markers import Handle

# Parameters that count the traces of a process, or are places in its files.
_OF_THIS_PROCESS = frozenset({"call", "serial", "tape", "where"})
# Addresses, identities and numbers of traces, which differ between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|\bid=\d+|\btrace \d+\b")
_MAX_SHOWN = 8

Line = tuple[str, str]


def describe_jaxpr(closed: ClosedJaxpr) -> Iterator[Line]:
    """Yields the lines of a closed jaxpr, each with `file:line` of the script, or ""."""
    return _Description().of_program(closed)


def describe_value(value: ArrayLike) -> str:
    """Returns a text for an array or number: its type, and all of its bytes as a digest."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        if not value.is_fully_replicated:  # data, which may differ
            return f"{value.dtype}{list(value.shape)} of all replicas"
        value = value.addressable_data(0)
    array = np.asarray(value)
    text = f"{array.dtype}{list(array.shape)}"
    if array.size <= _MAX_SHOWN:
        return f"{text} {array.tolist()}"
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8)
    first = ", ".join(map(str, array.ravel()[:3].tolist()))
    return f"{text} [{first}, ...] with digest {digest.hexdigest()}"


class _Description:
    """Numbers for the variables of a jaxpr and its inner jaxprs, in order of definition."""

    def __init__(self) -> None:
        self._names: dict[Var, str] = {}

    def of_program(self, closed: ClosedJaxpr) -> Iterator[Line]:
        for var in closed.jaxpr.invars:
            yield f"{self._name(var)} = input {_aval(var)}", ""
        yield from self._equations(closed)

    def _constants(
        self, atoms: Iterable[Atom], new: dict[Var, ArrayLike], where: str
    ) -> Iterator[Line]:
        for var in variables_of(atoms):
            if var in new:
                yield f"{self._name(var)} = constant {describe_value(new.pop(var))}", where

    def _equations(self, program: AnyJaxpr) -> Iterator[Line]:
        jaxpr, consts = open_jaxpr(program)
        new: dict[Var, ArrayLike] = dict(zip(jaxpr.constvars, consts, strict=False))
        is_needed, _ = leading_to(jaxpr.eqns, jaxpr.outvars, _has_effect)
        for equation in itertools.compress(jaxpr.eqns, is_needed):
            inner: list[AnyJaxpr] = []
            params = " ".join(self._params(equation.params, inner))
            where = place_of(equation)
            yield from self._constants(equation.invars, new, where)
            operands = " ".join(map(self._atom, equation.invars))
            results = ", ".join(map(_aval, equation.outvars))
            names = " ".join(map(self._name, equation.outvars))
            text = f"{names} = {equation.primitive.name} {operands} {params} : {results}"
            yield _ADDRESS.sub("", text), where
            for one in inner:
                yield f"inputs {' '.join(map(self._name, open_jaxpr(one)[0].invars))}", where
                yield from self._equations(one)
        yield from self._constants(jaxpr.outvars, new, "")
        atoms, types = map(self._atom, jaxpr.outvars), map(_aval, jaxpr.outvars)
        yield f"results {' '.join(atoms)} : {', '.join(types)}", ""

    def _params(self, params: dict[str, Any], inner: list[AnyJaxpr]) -> Iterator[str]:
        for name in sorted(params):
            if name not in _OF_THIS_PROCESS:
                yield f"{name}={self._param(params[name], inner)}"

    def _param(self, value: object, inner: list[AnyJaxpr]) -> str:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            inner.append(value)
            return f"<{len(inner)}>"
        if isinstance(value, Handle):
            return f"{value.name}:{value.dtype}{list(value.shape)}"
        if isinstance(value, dict):
            items = (f"{key}: {self._param(value[key], inner)}" for key in value)
            return f"{{{', '.join(items)}}}"
        if isinstance(value, (set, frozenset)):  # its order differs between processes
            return f"{{{', '.join(sorted(self._param(item, inner) for item in value))}}}"
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return f"({', '.join(self._param(item, inner) for item in value)})"
        if isinstance(value, (np.ndarray, jax.Array)):
            return describe_value(value)
        if isinstance(value, jax.sharding.Sharding):
            # Its devices differ between processes.
            return f"{type(value).__name__} {getattr(value, 'spec', '')}"
        if isinstance(value, jax.sharding.Mesh):
            return f"Mesh {dict(value.shape)}"
        if isinstance(value, jax.Device):
            return str(value.platform)
        if isinstance(value, type):
            return value.__name__
        if callable(value) or hasattr(value, "call_wrapped"):  # to derive the call
            return str(getattr(value, "__qualname__", type(value).__name__))
        return str(value)

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            return describe_value(atom.val)
        return self._name(atom)

    def _name(self, var: Var) -> str:
        return self._names.setdefault(var, f"v{len(self._names)}")


def _has_effect(eqn: Equation) -> bool:
    """Returns whether an equation does something even if nothing needs its results."""
    return any(e.effects or not e.outvars or is_collective(e) for e in walk([eqn]))


def _aval(var: Atom) -> str:
    aval: Any = var.aval
    shape = getattr(aval, "shape", None)
    if shape is None:
        return str(aval)
    weak = " weak" if getattr(aval, "weak_type", False) else ""
    return f"{aval.dtype}[{','.join(map(str, shape))}]{weak}"
