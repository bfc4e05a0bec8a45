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

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, final

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.devices import LOCAL_AXIS, REPLICA_AXIS
from distributary.errors import UnsupportedError
from distributary.jaxprs import Equation, walk

# A gradient is an array ("dense"), rows of a table ("sparse", the number of rows in each of its
# reads), or absent (None).
Kind = Literal["dense"] | tuple[Literal["sparse"], tuple[int, ...]] | None


@final
@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Handle:
    """The identity of a variable in traced programs; it holds no state and keeps nothing alive.

    Attributes:
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

    cell: Any
    name: str
    shape: tuple[int, ...]
    dtype: Any
    num_copies: int | None = None
    summed: bool = False
    parts: P = P()

    def __post_init__(self) -> None:
        self.dtype = jnp.dtype(self.dtype)

    @property
    def per_replica(self) -> bool:
        """True if each replica has a value of its own."""
        return self.num_copies is not None

    @property
    def may_vary(self) -> bool:
        """True if replicas may hold different values inside a replica program."""
        return self.per_replica or self.summed

    def aval(self, of_one_replica: bool) -> jax.core.ShapedArray:
        """Returns the abstract value, as one replica sees it or as it is stored."""
        stacked = not of_one_replica and self.num_copies is not None
        shape = (self.num_copies, *self.shape) if stacked else self.shape
        return jax.core.ShapedArray(shape, self.dtype)

    def __repr__(self) -> str:
        return self.name


# The replica's number is read like a variable. Otherwise it would be baked into a jaxpr that JAX
# caches and uses again for another replica.
REPLICA_ID = Handle(None, "replica_id_in_sync_group", (), "int32")

read_p = Primitive("variable_read")
read_p.def_abstract_eval(lambda *, handle, aval: aval)

sparse_read_p = Primitive("variable_sparse_read")
sparse_read_p.def_abstract_eval(
    lambda ids, *, handle: jax.core.ShapedArray((*ids.shape, *handle.shape[1:]), handle.dtype)
)

write_p = Primitive("variable_write")
write_p.multiple_results = True
write_p.def_abstract_eval(lambda value, *, handle, serial, where: [])

tape_p = Primitive("gradient_tape")
tape_p.multiple_results = True
tape_p.def_abstract_eval(lambda *, tape, event: [])

# Operands: the targets, one seed per target, the array sources. Variable sources are in `handles`.
# `kinds` has the kind of each source's gradient (arrays, then handles).
grad_p = Primitive("tape_gradient")
grad_p.multiple_results = True


def _grad_abstract_eval(
    *operands: jax.core.ShapedArray,
    tape: int,
    call: int,
    num_targets: int,
    handles: Sequence[Handle],
    kinds: Sequence[Kind],
) -> list[jax.core.ShapedArray]:
    sources: list[jax.core.ShapedArray | Handle] = [*operands[2 * num_targets :], *handles]
    outs = []
    for source, kind in zip(sources, kinds, strict=True):
        if kind == "dense":
            outs.append(jax.core.ShapedArray(source.shape, source.dtype))
        elif kind is not None:
            num_rows = sum(kind[1])
            row = jax.core.ShapedArray((num_rows, *source.shape[1:]), source.dtype)
            outs += [row, jax.core.ShapedArray((num_rows,), "int32")]
    return outs


grad_p.def_abstract_eval(_grad_abstract_eval)

MARKERS = frozenset({read_p, sparse_read_p, write_p, tape_p, grad_p})

# Marks a value that a worker sends to parameter servers. It is the identity, and no marker of a
# variable, so it stays in the program. The servers compute whatever depends on its result.
push_p = Primitive("push")
push_p.def_impl(lambda value: value)
push_p.def_abstract_eval(lambda value: value)
mlir.register_lowering(push_p, lambda ctx, value: [value])
ad.deflinear(push_p, lambda cotangent: [push_p.bind(cotangent)])
batching.defvectorized(push_p)


def push(value: Array) -> Array:
    """Marks a value that a worker sends to the servers, which compute what depends on it."""
    return push_p.bind(value)


# The whole value of a variable of which every device holds a part, where a step reads it, and the
# parts of its gradient. Both are the identity; where they are lowered they say where values lie.
gather_p = Primitive("gather_parts")
scatter_p = Primitive("scatter_parts")


def _lies(value: Array, parts: NamedSharding, is_whole: bool) -> Array:
    if not is_whole and LOCAL_AXIS in parts.spec:
        # Sums go to parts of all replicas first, which then travel between hosts.
        every = [("host", LOCAL_AXIS) if axis == LOCAL_AXIS else axis for axis in parts.spec]
        value = jax.lax.with_sharding_constraint(value, NamedSharding(parts.mesh, P(*every)))
    # What a value is cast from is not gathered instead of it.
    value = jax.lax.with_sharding_constraint(value, parts)
    # Each logical device keeps its part, if the value is divided over these as well.
    axes = [None if axis in (REPLICA_AXIS, LOCAL_AXIS) else axis for axis in parts.spec]
    whole = NamedSharding(parts.mesh, P(*axes))
    return jax.lax.with_sharding_constraint(value, whole) if is_whole else value


for _p, _transposed in ((gather_p, scatter_p), (scatter_p, gather_p)):
    _p.def_impl(lambda value, *, parts: value)
    _p.def_abstract_eval(lambda value, *, parts: value)
    mlir.register_lowering(
        _p,
        mlir.lower_fun(functools.partial(_lies, is_whole=_p is gather_p), multiple_results=False),
    )
    ad.deflinear2(_p, lambda ct, value, *, parts, _of=_transposed: [_of.bind(ct, parts=parts)])
    # Of several values at once, only the numbers matter.
    batching.primitive_batchers[_p] = lambda args, dims, *, parts: (args[0], dims[0])


def gathered(value: Array, parts: NamedSharding) -> Array:
    """Returns the whole value of a variable in a step of the whole batch.

    Args:
        value: The value, of which every device holds a part.
        parts: The sharding of its parts, which its gradient gets.
    """
    return gather_p.bind(value, parts=parts)


# In a program of several devices, the state that additions to a sum start from.
start_p = Primitive("start_of_sum")
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
    return start_p.bind(value)


def _write_jvp(
    primals: Sequence[Array], tangents: Sequence[Array], **params: Any
) -> tuple[list[Array], list[Array]]:
    write_p.bind(*primals, **params)
    return [], []


def _refuse_write_batching(
    args: Sequence[Array], dims: Sequence[int], *, handle: Handle, **params: Any
) -> NoReturn:
    raise UnsupportedError(
        f"Variable {handle.name!r} is assigned inside a function transformed by jax.vmap, with a"
        " value that differs per mapped element. Return the value from the mapped function and"
        " assign it after the vmap."
    )


def _batch_sparse_read(
    args: Sequence[Array], dims: Sequence[int], *, handle: Handle
) -> tuple[Array, int]:
    (ids,), (dim,) = args, dims
    return sparse_read_p.bind(jnp.moveaxis(ids, dim, 0), handle=handle), 0


def _refuse_gradient(*args: object, **params: object) -> NoReturn:
    raise UnsupportedError(
        "GradientTape.gradient was called inside a function transformed by jax.vmap or jax.grad."
        " Differentiate that function with jax.grad or jax.vjp on arrays (read variables with"
        " v.value() before), or move the tape outside of the transformation. A Keras layer with a"
        " tape trains in fit if the model has a train_step(self, data) with a tape."
    )


ad.primitive_jvps[write_p] = _write_jvp
ad.primitive_jvps[grad_p] = _refuse_gradient
batching.primitive_batchers[write_p] = _refuse_write_batching
batching.primitive_batchers[sparse_read_p] = _batch_sparse_read
batching.primitive_batchers[grad_p] = _refuse_gradient


def handles_read(eqns: Iterable[Equation]) -> list[Handle]:
    """Returns the handles whose state the equations need, in order of first use."""
    handles: dict[Handle, None] = {}
    for eqn in walk(eqns):
        if eqn.primitive in (read_p, sparse_read_p, write_p):
            handles.setdefault(eqn.params["handle"])
        elif eqn.primitive is grad_p:
            handles.update(dict.fromkeys(eqn.params["handles"]))
    return list(handles)


def handles_written(eqns: Iterable[Equation]) -> list[Handle]:
    """Returns the handles the equations write, in order of first write."""
    return list(
        dict.fromkeys(eqn.params["handle"] for eqn in walk(eqns) if eqn.primitive is write_p)
    )
