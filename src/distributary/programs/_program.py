"""State and captures of functions that are programs of global arrays, laid out on devices.

A replica can have several logical devices. With 2 of them, along an axis `"x"`, a
split of dim 0 leaves the equation

    b:f32[4,3] = on_logical_devices[sharding=NamedSharding(mesh, P(("x",), None))] a

which becomes a `with_sharding_constraint` when the program is lowered; XLA partitions the step
accordingly.
"""

import abc
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, num_logical_devices, sharding_on
from distributary.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from distributary.jaxprs import Array, aval_of, jaxpr_of, walk
from distributary.tracing import Handle, Line, Pure


class TracedProgram(abc.ABC):
    """One or more traced functions without markers, as a function of global arrays.

    Args:
        pures: The functions; the programs of the replicas, if there are several.

    Attributes:
        handles: The variables that it needs.
        written: Those that it assigns.
        read_only: Those that it does not.
        num_outs: Number of results.
        captures: For each function, the arrays that it captured.
        has_effects: Whether it does more than computing its outputs, such as calling the host.
        checks: The errors with which each check of values in it has failed.
        is_rewritten: Whether it has the forms that its devices run fast.
    """

    is_rewritten = False

    def __init__(self, pures: list[Pure]) -> None:
        self.pures = pures
        self.handles = list(dict.fromkeys(handle for pure in pures for handle in pure.handles))
        self.written = list(dict.fromkeys(handle for pure in pures for handle in pure.written))
        self.read_only = [handle for handle in self.handles if handle not in self.written]
        self.num_outs = pures[0].num_outs
        self.captures = [pure.captures for pure in pures]
        self.has_effects = any(pure.has_effects for pure in pures)
        self.checks = [failed for pure in pures for failed in pure.checks]

    def describe(self) -> list[Line]:
        """Returns the lines of the program, for a comparison with other workers."""
        return [line for pure in self.pures for line in pure.describe()]

    @property
    def jaxpr(self) -> Jaxpr:
        """The first function."""
        jaxpr: Jaxpr = self.pures[0].jaxpr
        return jaxpr

    @property
    def makes_first_output(self) -> bool:
        """Whether the first result is computed, not an input."""
        jaxpr = self.jaxpr
        return any(jaxpr.outvars[0] in eqn.outvars for eqn in jaxpr.eqns)

    @property
    def has_first_output_everywhere(self) -> bool:
        """True if every device computes its own first result."""
        return False

    def __call__(
        self,
        captures: Sequence[Sequence[Any]],
        written: Sequence[Any],
        read_only: Sequence[Any],
        args: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Runs the functions.

        Args:
            captures: `self.captures`.
            written: State of `self.written`.
            read_only: State of `self.read_only`.
            args: The arguments.

        Returns:
            The new state of `self.written`, and the results.
        """
        state = dict(zip((*self.written, *self.read_only), (*written, *read_only), strict=True))
        return self._run(captures, state, args)

    @abc.abstractmethod
    def _run(
        self, captures: Sequence[Sequence[Array]], state: dict[Handle, Array], args: Sequence[Any]
    ) -> tuple[list[Array], list[Any]]:
        """Runs the functions; see `__call__`."""


# `jax.lax.with_sharding_constraint` must know when it is traced whether it will run inside
# `jax.shard_map`, as steps do with several replicas but not with one. This primitive needs to know
# only when it is lowered.
constraint_p = Primitive("on_logical_devices")
constraint_p.def_abstract_eval(lambda x, *, sharding: x)
mlir.register_lowering(
    constraint_p,
    mlir.lower_fun(
        lambda x, *, sharding: jax.lax.with_sharding_constraint(x, sharding),
        multiple_results=False,
    ),
)
ad.deflinear2(constraint_p, lambda ct, _, *, sharding: [constraint_p.bind(ct, sharding=sharding)])


def _batched(
    args: Sequence[Array], dims: Sequence[int], *, sharding: NamedSharding
) -> tuple[Array, int]:
    (x,), (dim,) = args, dims
    spec = [*sharding.spec, *[None] * (x.ndim - 1 - len(sharding.spec))]
    spec.insert(dim, P.UNCONSTRAINED)
    return constraint_p.bind(x, sharding=NamedSharding(sharding.mesh, P(*spec))), dim


batching.primitive_batchers[constraint_p] = _batched


def constrained(x: Array, mesh: Mesh, spec: P) -> Array:
    """Returns the array of one replica, laid out over the replica's logical devices.

    Args:
        x: Array that is being traced.
        mesh: Mesh with the replicas' logical devices.
        spec: The axes of the logical devices over which each dim is split.
    """
    return constraint_p.bind(x, sharding=NamedSharding(mesh, spec))


def laid_out(value: Array, mesh: Mesh | None, spec: P) -> Array:
    """Returns a global array with a sharding that XLA must give it; unchanged without a mesh."""
    if mesh is None:
        return value
    sharding = sharding_on(mesh, spec)
    if not isinstance(value, jax.core.Tracer):
        try:
            sharding.shard_shape(np.shape(value))
        except ValueError:  # of rows: `jax_debug_nans` runs the step operation by operation
            return value
    return jax.lax.with_sharding_constraint(value, sharding)


def spec_of_split(mesh: Mesh, shape: Sequence[int], parts: Sequence[int]) -> P:
    """Returns the axes of logical devices that split each dim of an array into `parts` pieces.

    Raises:
        InvalidValueError: if there is not one number per dim, a dim does not divide, or the product
            is not the number of logical devices.
        InvalidTypeError: if a number is not an int.
    """
    what = "experimental_split_to_logical_devices: partition_dimensions is"
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in parts):
        raise InvalidTypeError(f"{what} {parts!r}, expected ints.")
    if len(parts) != len(shape):
        raise InvalidValueError(f"{what} {parts!r}, expected one number for each dim of {shape}.")
    for n, size in zip(parts, shape, strict=True):
        if n < 1 or size % n:
            raise InvalidValueError(
                f"{what} {parts!r}, but {size} of the shape {shape} does not divide into {n} equal"
                " parts."
            )
    product = math.prod(parts)
    if product != num_logical_devices(mesh):
        raise InvalidValueError(
            f"{what} {parts!r}, whose product is {product}; a replica has"
            f" {num_logical_devices(mesh)} logical devices. The product must be that number."
        )
    free = [(name, size) for name, size in mesh.shape.items() if name != REPLICA_AXIS]
    spec: list[tuple[str, ...] | None] = []
    for n in parts:
        names = []
        for name, size in list(free):
            if n % size == 0:
                n //= size
                names.append(name)
                free.remove((name, size))
        spec.append(tuple(names) or None)
    return P(*spec)


def eval_on_replica(jaxpr: Jaxpr, replica_id: Array, args: Sequence[Array]) -> list[Array]:
    """Evaluates the program of a replica, inside `jax.shard_map`.

    `replica_id` takes the place of every `axis_index`: with logical devices, jax 0.10.2 compiles an
    `axis_index` only if it was traced inside the `shard_map`.
    """
    ids = [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "axis_index"]
    others = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "axis_index"]
    program = jaxpr_of([*jaxpr.invars, *ids], jaxpr.outvars, others)
    return jax.core.eval_jaxpr(program, (), *args, *[replica_id] * len(ids))


def whole_on_cores(arrays: Sequence[Array], mesh: Mesh | None) -> list[Array]:
    """Returns results of one replica, whole on each logical device if a replica has several.

    Args:
        arrays: The results, inside `jax.shard_map`.
        mesh: Mesh with the replicas' logical devices; None without one.
    """
    if mesh is None or num_logical_devices(mesh) == 1:
        return list(arrays)
    return [constrained(x, mesh, P()) for x in arrays]


def check_on_cores(jaxpr: Jaxpr, mesh: Mesh | None) -> None:
    """Refuses programs that JAX 0.10.2 cannot compile for replicas with several logical devices.

    Raises:
        UnsupportedError: for `jax.lax.axis_index` inside control flow, and on CPU devices for
            reductions of bfloat16, where XLA would end the process.
    """
    if mesh is None or num_logical_devices(mesh) == 1:
        return
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    top_level = {id(eqn) for eqn in jaxpr.eqns}
    for eqn in walk(jaxpr.eqns):
        name = eqn.primitive.name
        if name == "axis_index" and id(eqn) not in top_level:
            raise UnsupportedError(
                "jax.lax.axis_index inside control flow or a jitted function is not supported with"
                " several logical devices per replica. Use"
                " get_replica_context().replica_id_in_sync_group."
            )
        is_bfloat16 = any(aval_of(v).dtype.name == "bfloat16" for v in eqn.outvars)
        if on_cpu and is_bfloat16 and name in ("psum", "reduce_scatter", "pmax", "pmin"):
            raise UnsupportedError(
                "A reduction of bfloat16 over replicas that have several logical devices each is"
                " not possible on CPU devices. Convert the values to float32 before all_reduce."
            )
