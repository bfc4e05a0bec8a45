"""Describes a program as lines of text that are the same in every process that traces it.

`x @ w` gives

    v0 = input float32[4,3]
    v1 = input float32[3,3]
    v2 = dot_general v0 v1 dimension_numbers=(((1), (0)), ((), ())) ... : float32[4,3]
    results v2

The lines have no addresses, counters of this process or places of constants in memory. Constants
are described by their bytes.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distributary.tracing._markers import Handle

__all__ = ["describe_jaxpr", "describe_value"]

# Parameters that count the traces of a process, or are places in its files.
_OF_THIS_PROCESS = frozenset({"call", "serial", "tape", "where"})
# Addresses, identities and numbers of traces, which differ between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|\bid=\d+|\btrace \d+\b")
_INSTALLED = os.path.dirname(os.path.dirname(jax.__file__))
_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    *(os.path.join(_INSTALLED, name, "") for name in ("jax", "keras", "optax", "flax")),
)
_MAX_SHOWN = 8

Line = tuple[str, str]


def describe_jaxpr(closed: Any, names: Sequence[str] = ()) -> Iterator[Line]:
    """Yields the lines of a closed jaxpr, each with `file:line` of the script, or "".

    Args:
        closed: The jaxpr.
        names: Readable names of its first inputs.
    """
    return _Description().of_program(closed, names)


def describe_value(value: Any) -> str:
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
        self._names: dict[Any, str] = {}

    def of_program(self, closed: Any, names: Sequence[str]) -> Iterator[Line]:
        jaxpr = closed.jaxpr
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            yield f"{self._name(var)} = constant {describe_value(const)}", ""
        for i, var in enumerate(jaxpr.invars):
            called = names[i] if i < len(names) else "input"
            yield f"{self._name(var)} = {called} {_aval(var.aval)}", ""
        yield from self._equations(jaxpr)

    def _equations(self, jaxpr: Any) -> Iterator[Line]:
        for equation in jaxpr.eqns:
            inner: list[Any] = []
            params = " ".join(self._params(equation.params, inner))
            operands = " ".join(map(self._atom, equation.invars))
            results = ", ".join(_aval(var.aval) for var in equation.outvars)
            made = " ".join(self._name(var) for var in equation.outvars)
            where = _where(equation)
            text = f"{made} = {equation.primitive.name} {operands} {params} : {results}"
            yield _ADDRESS.sub("", text), where
            for one in inner:
                yield from self._inside(one, where)
        yield f"results {' '.join(map(self._atom, jaxpr.outvars))}", ""

    def _inside(self, inner: Any, where: str) -> Iterator[Line]:
        closed = isinstance(inner, jex_core.ClosedJaxpr)
        jaxpr = inner.jaxpr if closed else inner
        if closed:
            for var, const in zip(jaxpr.constvars, inner.consts, strict=True):
                yield f"{self._name(var)} = constant {describe_value(const)}", where
        yield f"inputs {' '.join(map(self._name, jaxpr.invars))}", where
        yield from self._equations(jaxpr)

    def _params(self, params: dict[str, Any], inner: list[Any]) -> Iterator[str]:
        for name in sorted(params):
            if name not in _OF_THIS_PROCESS:
                yield f"{name}={self._param(params[name], inner)}"

    def _param(self, value: Any, inner: list[Any]) -> str:
        if isinstance(value, (jex_core.ClosedJaxpr, jex_core.Jaxpr)):
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

    def _atom(self, atom: Any) -> str:
        if isinstance(atom, jex_core.Literal):
            return describe_value(atom.val)
        return self._name(atom)

    def _name(self, var: Any) -> str:
        return self._names.setdefault(var, f"v{len(self._names)}")


def _aval(aval: Any) -> str:
    shape = getattr(aval, "shape", None)
    if shape is None:
        return str(aval)
    weak = " weak" if getattr(aval, "weak_type", False) else ""
    return f"{aval.dtype}[{','.join(map(str, shape))}]{weak}"


def _where(equation: Any) -> str:
    """Returns `file:line` of the script's code that an equation comes from, or ""."""
    traceback = equation.source_info.traceback
    frames: Iterable[Any] = () if traceback is None else traceback.frames
    for frame in frames:
        name = frame.file_name
        if not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return f"{name}:{frame.line_num}"
    return ""
