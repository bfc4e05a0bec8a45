"""Marker primitives for variables and gradient tapes in traced steps.

JAX programs are pure. While a step is traced, `Variable.value()`, `Variable.assign()` and
`GradientTape` leave markers in the jaxpr. `w.assign_add(x); return w * 2` gives

    { lambda ; a:f32[2]. let
        b:f32[2] = variable_read[handle=w]
        c:f32[2] = add b a
        variable_write[handle=w] c
        d:f32[2] = variable_read[handle=w]
        e:f32[2] = mul d 2.0
      in (e,) }

`_interpreter` turns the markers into plain data flow before anything is compiled. A marker is an
equation and not a captured tracer, so it stays right when JAX caches the jaxpr of a nested `jit`,
`scan` or `cond` and uses it again.

A marker has no implementation: you can only bind it while a step is traced.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, final

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from distributary.errors import UnsupportedError
from distributary.topology import REPLICA_AXIS, all_params

Array: TypeAlias = Any  # a jax.Array or a tracer
Jaxpr: TypeAlias = Any
Equation: TypeAlias = Any


class Cell(Protocol):
    """The holder of the state behind a handle: a variable."""

    @property
    def name(self) -> str: ...


@final
class Handle:
    """The identity of a variable in traced programs; it holds no state and keeps nothing alive.

    Args:
        cell: The variable, referenced weakly; None for data that a program is given in every call.
        name: Name used in messages.
        shape: Shape of the value one replica sees.
        dtype: Dtype of the value.
        num_copies: Number of replicas if each has a value of its own (synchronization ON_READ),
            else None. Outside of replica programs such state is one array `[replica, *shape]`.
        summed: Whether the replicas add to the value. Inside a replica program, replica 0 starts
            from the value and the others from zeros; at the end it becomes the sum of theirs.
        parts: Sharding of the value between programs if every device holds a part of it, else
            `P()`.
    """

    __slots__ = ("__weakref__", "cell", "dtype", "name", "num_copies", "parts", "shape", "summed")

    def __init__(
        self,
        cell: Any,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        num_copies: int | None = None,
        summed: bool = False,
        parts: P = P(),
    ) -> None:
        self.parts = parts
        self.summed = summed
        self.cell = cell
        self.name = name
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        self.num_copies = num_copies

    @property
    def per_replica(self) -> bool:
        """True if each replica has a value of its own."""
        return self.num_copies is not None

    @property
    def may_vary(self) -> bool:
        """True if replicas may hold different values inside a replica program."""
        return self.per_replica or self.summed

    def aval(self, of_one_replica: bool) -> Any:
        """Returns the abstract value, as one replica sees it or as it is stored."""
        stacked = not of_one_replica and self.num_copies is not None
        shape = (self.num_copies, *self.shape) if stacked else self.shape
        return jax.core.ShapedArray(shape, self.dtype)

    def __repr__(self) -> str:
        return self.name


# The replica's number is read like a variable. Otherwise it would be baked into a jaxpr that JAX
# caches and uses again for another replica.
REPLICA_ID = Handle(None, "replica_id_in_sync_group", (), "int32")

read_p = jex_core.Primitive("variable_read")
read_p.def_abstract_eval(lambda *, handle, aval: aval)

sparse_read_p = jex_core.Primitive("variable_sparse_read")
sparse_read_p.def_abstract_eval(
    lambda ids, *, handle: jax.core.ShapedArray((*ids.shape, *handle.shape[1:]), handle.dtype)
)

write_p = jex_core.Primitive("variable_write")
write_p.multiple_results = True
write_p.def_abstract_eval(lambda value, *, handle, serial, where: [])

tape_p = jex_core.Primitive("gradient_tape")
tape_p.multiple_results = True
tape_p.def_abstract_eval(lambda *, tape, event: [])

# Operands: the targets, one seed per target, the array sources. Variable sources are in `handles`.
# `kinds` has the kind of each source's gradient (arrays, then handles).
grad_p = jex_core.Primitive("tape_gradient")
grad_p.multiple_results = True


def _grad_abstract_eval(
    *operands: Any, tape: int, call: int, num_targets: int, handles: Any, kinds: Any
) -> list[Any]:
    arrays = operands[2 * num_targets :]
    outs: list[Any] = []
    for source, kind in zip((*arrays, *handles), kinds, strict=True):
        if kind == "dense":
            outs.append(jax.core.ShapedArray(source.shape, source.dtype))
        elif kind is not None:
            num_rows = kind[1]
            row = jax.core.ShapedArray((num_rows, *source.shape[1:]), source.dtype)
            outs += [row, jax.core.ShapedArray((num_rows,), "int32")]
    return outs


grad_p.def_abstract_eval(_grad_abstract_eval)

MARKERS = frozenset({read_p, sparse_read_p, write_p, tape_p, grad_p})

# Marks a value that a worker sends to parameter servers. It is the identity, and no marker of a
# variable, so it stays in the program. The servers compute whatever depends on its result.
push_p = jex_core.Primitive("push")
push_p.def_impl(lambda value: value)
push_p.def_abstract_eval(lambda value: value)
mlir.register_lowering(push_p, lambda ctx, value: [value])
ad.deflinear(push_p, lambda cotangent: [push_p.bind(cotangent)])
batching.defvectorized(push_p)


def push(value: Array) -> Array:
    """Marks a value that a worker sends to the servers, which compute what depends on it."""
    pushed: Array = push_p.bind(value)
    return pushed


# In a program of several devices, the state that additions to a sum start from.
start_p = jex_core.Primitive("start_of_sum")
start_p.def_abstract_eval(lambda value: value)
mlir.register_lowering(
    start_p,
    mlir.lower_fun(
        lambda x: jnp.where(jax.lax.axis_index(REPLICA_AXIS) == 0, x, jnp.zeros_like(x)),
        multiple_results=False,
    ),
)


def start_of_sum(value: Array) -> Array:
    """Returns the value on replica 0 and zeros on the others, inside a replica program."""
    start: Array = start_p.bind(value)
    return start


def _write_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    write_p.bind(*primals, **params)
    return [], []


def _refuse_write_batching(args: Any, dims: Any, *, handle: Handle, **params: Any) -> Any:
    raise UnsupportedError(
        f"Variable {handle.name!r} is assigned inside a function transformed by jax.vmap, with a"
        " value that differs per mapped element. Return the value from the mapped function and"
        " assign it after the vmap."
    )


def _batch_sparse_read(args: Any, dims: Any, *, handle: Handle) -> tuple[Any, int]:
    (ids,), (dim,) = args, dims
    return sparse_read_p.bind(jnp.moveaxis(ids, dim, 0), handle=handle), 0


def _refuse_gradient(*args: Any, **params: Any) -> Any:
    raise UnsupportedError(
        "GradientTape.gradient was called inside a function transformed by jax.vmap or jax.grad."
        " Differentiate that function with jax.grad or jax.vjp on arrays (read variables with"
        " v.value() before), or move the tape outside of the transformation."
    )


ad.primitive_jvps[write_p] = _write_jvp
ad.primitive_jvps[grad_p] = _refuse_gradient
batching.primitive_batchers[write_p] = _refuse_write_batching
batching.primitive_batchers[sparse_read_p] = _batch_sparse_read
batching.primitive_batchers[grad_p] = _refuse_gradient


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr, closed or not, and its constants."""
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def jaxpr_of(
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Equation],
    constvars: Sequence[Any] = (),
) -> Jaxpr:
    """Builds a jaxpr from its parts."""
    debug_info = jex_core.DebugInfo(
        "distributary", "step", ("",) * len(invars), ("",) * len(outvars)
    )
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return jex_core.Jaxpr(
        list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info
    )


def opened(closed: Any) -> Jaxpr:
    """Returns a closed jaxpr with its constants as first inputs."""
    jaxpr = closed.jaxpr
    return jaxpr_of([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)


def sub_jaxprs(eqn: Equation) -> Iterator[Jaxpr]:
    """Yields the jaxprs in the parameters of an equation, opened."""
    for sub in jex_core.jaxprs_in_params(all_params(eqn.params)):
        yield open_jaxpr(sub)[0]


def contains(eqn: Equation, primitives: frozenset[Any]) -> bool:
    """Returns whether `eqn` is, or carries, an equation of one of `primitives`."""
    return eqn.primitive in primitives or any(
        contains(inner, primitives) for sub in sub_jaxprs(eqn) for inner in sub.eqns
    )


def walk(eqns: Iterable[Equation]) -> Iterator[Equation]:
    """Yields all equations in program order, those of nested jaxprs included."""
    for eqn in eqns:
        yield eqn
        for sub in sub_jaxprs(eqn):
            yield from walk(sub.eqns)


def handles_read(eqns: Iterable[Equation]) -> list[Handle]:
    """Returns the handles whose state the equations need, in order of first use."""
    found: dict[Handle, None] = {}
    for eqn in walk(eqns):
        if eqn.primitive in (read_p, sparse_read_p, write_p):
            found.setdefault(eqn.params["handle"])
        elif eqn.primitive is grad_p:
            found.update(dict.fromkeys(eqn.params["handles"]))
    return list(found)


def handles_written(eqns: Iterable[Equation]) -> list[Handle]:
    """Returns the handles the equations write, in order of first write."""
    return list(
        dict.fromkeys(eqn.params["handle"] for eqn in walk(eqns) if eqn.primitive is write_p)
    )
