"""Reductions over replicas: their operations and arithmetic, and ways to sum in a program."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jax.typing import ArrayLike

from distributary.devices import REPLICA_AXIS, Nest
from distributary.errors import InvalidTypeError, InvalidValueError, described, shown
from distributary.options import ReduceOp
from distributary.tracing import current_scope


def as_reduce_op(value: object, what: str) -> ReduceOp:
    """Returns a `ReduceOp`, given itself or its name in any case."""
    if isinstance(value, ReduceOp):
        return value
    if isinstance(value, str):
        if value.upper() in ReduceOp.__members__:
            return ReduceOp[value.upper()]
        raise InvalidValueError(
            f"{what}: reduce_op is {shown(value)}, which is not a valid ReduceOp; expected"
            " ReduceOp.SUM or ReduceOp.MEAN, or their names."
        )
    raise InvalidTypeError(
        f"{what}: reduce_op is {shown(value)}, expected ReduceOp.SUM or ReduceOp.MEAN, or their"
        " names. There are only these two; the operation comes first, then the value."
    )


def check_reducible(value: ArrayLike | None, what: str) -> jax.Array:
    """Returns the value as an array that can be summed.

    Raises:
        InvalidTypeError: for None, strings, objects, random keys and booleans.
    """
    dtype = getattr(value, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if value is None or isinstance(value, (str, bytes)) or is_key or dtype == np.dtype(object):
        raise InvalidTypeError(f"{what}: got {shown(value)}, expected an array of numbers.")
    try:
        array = jnp.asarray(value)
    except TypeError as error:
        raise InvalidTypeError(
            f"{what}: got {described(value)}; expected an array of numbers."
        ) from error
    if array.dtype == jnp.bool_:
        raise InvalidTypeError(
            f"{what}: got a boolean array of shape {array.shape}, and booleans cannot be added."
            " Convert it, value.astype(jnp.int32), to count the True ones."
        )
    return array


def reduce_arrays(
    op: ReduceOp,
    arrays: Sequence[jax.Array],
    num_replicas: int,
    add: Callable[[list[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    """Sums or averages every array over the replicas.

    Args:
        op: The operation.
        arrays: This replica's arrays.
        num_replicas: Number of replicas.
        add: The collective: sums each array over the replicas.

    Returns:
        The results; their dtype is that of the arrays, or float32 for the mean of integers.
    """
    prepared = [_prepare(op, array, num_replicas) for array in arrays]
    sums = iter(add([part for parts, _ in prepared for part in parts]))
    return [done(*itertools.islice(sums, len(parts))) for parts, done in prepared]


# The arrays to sum, and a function from the sums to the result.
_Prepared: TypeAlias = tuple[list[jax.Array], Callable[..., jax.Array]]


def _prepare(op: ReduceOp, array: jax.Array, num_replicas: int) -> _Prepared:
    if jnp.iscomplexobj(array):
        # In parts, because XLA aborts on an all-reduce of complex constants (JAX 0.10.2), and
        # gradients of complex sums are such constants.
        real, done = _prepare(op, array.real, num_replicas)
        imag, _ = _prepare(op, array.imag, num_replicas)
        return [*real, *imag], lambda x, y: lax.complex(done(x), done(y))
    if op is ReduceOp.MEAN:
        return _prepare_mean(array, num_replicas)
    return [array], lambda total: total


def _prepare_mean(array: jax.Array, num_replicas: int) -> _Prepared:
    dtype = array.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        # Quotients and remainders are exact, and their sums do not overflow: quotients are rounded
        # towards zero, and the sum of the remainders, too large for 8 bits, is int32.
        count = jnp.asarray(num_replicas, dtype)
        parts = [lax.div(array, count), lax.rem(array, count).astype(jnp.int32)]

        def mean(quotient: jax.Array, remainder: jax.Array) -> jax.Array:
            return quotient.astype(jnp.float32) + remainder.astype(jnp.float32) / num_replicas

        return parts, mean
    if dtype in (jnp.float16, jnp.bfloat16):
        wide, done = _prepare_mean(array.astype(jnp.float32), num_replicas)
        return wide, lambda total: done(total).astype(dtype)
    if num_replicas == 1:
        return [array], lambda total: total
    # Scaled by a power of two, which is exact, so that the sum cannot exceed the largest number.
    scale = 2.0 ** -math.ceil(math.log2(num_replicas))
    rest = num_replicas * scale
    scaled = array * jnp.asarray(scale, dtype)
    return [scaled], lambda total: total if rest == 1.0 else total / jnp.asarray(rest, dtype)


# Ways to sum arrays over the replica axis inside a replica program. Each takes the arrays of this
# replica and returns their sums over all. They compile to different collectives, with one result.

Sum: TypeAlias = Callable[[list[jax.Array]], list[jax.Array]]
Accumulate: TypeAlias = Callable[[list[jax.Array]], jax.Array]
# The numbers of the arrays that travel together.
Packs: TypeAlias = list[list[int]]
# Groups of replica ids; every replica is in exactly one.
Groups: TypeAlias = tuple[tuple[int, ...], ...]
# Elements of a float32 vector that a TPU keeps together.
_TILE = 1024


def all_reduce(arrays: list[jax.Array]) -> list[jax.Array]:
    """Sums each array by an all-reduce of its own, where it is ready.

    XLA combines them: CPUs to one collective, GPUs and TPUs up to a threshold.
    """
    return list(lax.psum(arrays, REPLICA_AXIS))


def all_reduce_of_vectors(arrays: list[jax.Array]) -> list[jax.Array]:
    """Sums arrays in one all-reduce with one vector per dtype.

    gloo pays for every array of a collective.
    """
    return _as_vectors(arrays, all_reduce)


def _as_vectors(arrays: list[jax.Array], sum_vectors: Sum) -> list[jax.Array]:
    """Sums `arrays`, which travel as one vector per dtype."""
    of_dtype: dict[Any, list[int]] = {}
    # The largest array comes first. XLA:CPU pads the first one to the length of the vector, and
    # fuses the padding with the computation of the array. If that is a short sum, as for a bias, it
    # is computed for every element of the vector.
    for i in sorted(range(len(arrays)), key=lambda i: -arrays[i].size):
        of_dtype.setdefault(arrays[i].dtype, []).append(i)
    vectors = [_as_vector([arrays[i] for i in indices]) for indices in of_dtype.values()]
    results: dict[int, jax.Array] = {}
    for indices, vector in zip(of_dtype.values(), sum_vectors(vectors), strict=True):
        start = 0
        for i in indices:
            part = lax.slice(vector, (start,), (start + arrays[i].size,))
            results[i] = part.reshape(arrays[i].shape)
            start += arrays[i].size
    return [results[i] for i in range(len(arrays))]


def _as_vector(arrays: list[jax.Array]) -> jax.Array:
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    # No concatenation: XLA:CPU fuses the computation of the gradients into it, which is then 100
    # times slower.
    vector = jnp.zeros(sum(array.size for array in arrays), arrays[0].dtype)
    start = 0
    for array in arrays:
        vector = lax.dynamic_update_slice(vector, array.reshape(-1), (start,))
        start += array.size
    return vector


def two_level(arrays: list[jax.Array], groups: Groups) -> list[jax.Array]:
    """Sums by reduce-scatter inside groups, all-reduce across them, all-gather inside.

    The groups have equal size. Two groups exchange as much data as if each were one replica. There
    is one vector per dtype.
    """
    inside = [list(group) for group in groups]
    across = [list(members) for members in zip(*groups, strict=True)]

    def one(vector: jax.Array) -> jax.Array:
        # Libtpu scatters and gathers only whole tiles; for other sizes it all-reduces twice.
        whole_tiles = _TILE * len(inside[0])
        multiple = whole_tiles if vector.size >= whole_tiles else len(inside[0])
        padded = jnp.pad(vector, (0, -vector.size % multiple))
        part = lax.psum_scatter(padded, REPLICA_AXIS, axis_index_groups=inside, tiled=True)
        part = lax.psum(part, REPLICA_AXIS, axis_index_groups=across)
        whole = lax.all_gather(part, REPLICA_AXIS, axis_index_groups=inside, tiled=True)
        return whole[: vector.size]

    return _as_vectors(arrays, lambda vectors: [one(v) if v.size else v for v in vectors])


def neighbors(num_replicas: int) -> Groups:
    """Returns about as many groups of neighbors as each has members; () for a prime number."""
    sizes = [size for size in range(2, num_replicas) if num_replicas % size == 0]
    if not sizes:
        return ()
    size = min(sizes, key=lambda size: (abs(size - math.sqrt(num_replicas)), -size))
    return tuple(tuple(range(start, start + size)) for start in range(0, num_replicas, size))


def ring(array: jax.Array, num_replicas: int) -> jax.Array:
    """Sums by reduce-scatter, then all-gather: the two halves of a ring all-reduce."""
    if array.size < num_replicas:
        return lax.psum(array, REPLICA_AXIS)
    padding = -array.size % num_replicas
    flat = jnp.pad(array.reshape(-1), (0, padding))
    part = lax.psum_scatter(flat, REPLICA_AXIS, tiled=True)
    whole = lax.all_gather(part, REPLICA_AXIS, tiled=True)
    return whole[: array.size].reshape(array.shape)


def add_rows(rows: jax.Array, accumulate: Accumulate | None) -> jax.Array:
    """Returns the sum of `[replica, *shape]` over the replicas, in replica order."""
    parts = [rows[i] for i in range(rows.shape[0])]
    return functools.reduce(operator.add, parts) if accumulate is None else accumulate(parts)


def sum_in_packs(arrays: Sequence[jax.Array], sum_pack: Sum, packs: Packs) -> list[jax.Array]:
    """Sums packs of arrays one after the other, each by a collective of its own."""
    results: dict[int, jax.Array] = {}
    previous: list[jax.Array] = []
    for pack in packs:
        operands = [arrays[i] for i in pack]
        if previous and previous[0].size:
            # A dependency, because XLA merges collectives that do not depend on each other.
            zero = _zero_depending_on(previous[0])
            operands = [operand + zero.astype(operand.dtype) for operand in operands]
        previous = sum_pack(operands)
        results.update(zip(pack, previous, strict=True))
    return [results[i] for i in range(len(arrays))]


def _zero_depending_on(array: jax.Array) -> jax.Array:
    """Returns zero for any bits of `array`, hidden from XLA, which would remove a barrier."""
    element = lax.stop_gradient(array).reshape(-1)[0]
    if jnp.issubdtype(element.dtype, jnp.complexfloating):
        element = element.real
    bits = lax.bitcast_convert_type(element, f"uint{element.dtype.itemsize * 8}")
    last = jnp.asarray(element.dtype.itemsize * 8 - 1, bits.dtype)
    sign = lax.shift_right_logical(bits, last)
    return lax.shift_right_logical(sign, jnp.ones((), bits.dtype))


def packs_by_count(arrays: Sequence[jax.Array], num_packs: int) -> Packs:
    """Divides arrays into `num_packs` equal packs, the last with the rest; 0: one pack each.

    The last pack comes first, because the last gradients are ready first and packs wait for each
    other.
    """
    count = len(arrays) if num_packs == 0 else min(num_packs, len(arrays))
    size = len(arrays) // max(count, 1)
    starts = [i * size for i in range(count)] + [len(arrays)]
    return [list(range(a, b)) for a, b in itertools.pairwise(starts)][::-1]


def packs_by_bytes(arrays: Sequence[jax.Array], bytes_per_pack: int) -> Packs:
    """Divides arrays into packs of consecutive ones; a pack is full once it holds `bytes_per_pack`.

    The order is reversed, as in tf.distribute, because the last gradients are ready first.
    """
    result: Packs = []
    size = bytes_per_pack
    for i in reversed(range(len(arrays))):
        if size >= bytes_per_pack:
            result.append([])
            size = 0
        result[-1].append(i)
        size += arrays[i].size * arrays[i].dtype.itemsize
    return result


def over_replicas(
    function: Callable[[list[Nest]], list[Nest]], mesh: Mesh | AbstractMesh | None
) -> Callable[[list[Nest]], list[Nest]]:
    """Returns a function of all replicas, given one that combines nests of one replica.

    It takes nests of arrays `[replica, *shape]`, on a mesh or, without one, on one device.
    """
    if mesh is None:
        of_each = jax.vmap(function, axis_name=REPLICA_AXIS)
        return lambda stacked: _first(of_each(stacked))
    return jax.shard_map(
        lambda stacked: function(_first(stacked)),
        mesh=mesh,
        in_specs=P(REPLICA_AXIS),
        out_specs=P(),
        check_vma=False,
    )


def _first(stacked: list[Nest]) -> list[Nest]:
    return jax.tree.map(lambda rows: rows[0], stacked)


def all_gather(array: jax.Array, axis: int, num_replicas: int) -> jax.Array:
    """Concatenates the replicas' arrays along `axis`, on every replica."""
    if num_replicas == 1:
        return array
    scope = current_scope()
    if scope is None or scope.uneven is None:
        if array.shape[axis] == 0:
            # There is nothing to gather, and XLA refuses to.
            return jnp.concatenate([array] * num_replicas, axis)
        return lax.all_gather(array, REPLICA_AXIS, axis=axis, tiled=True)
    # The parts of an uneven batch differ in length: each replica puts its own into zeros, and these
    # are summed.
    sizes = scope.uneven.sizes(array.shape, axis)
    starts = jnp.asarray([sum(sizes[:i]) for i in range(num_replicas)], jnp.int32)
    shape = (*array.shape[:axis], sum(sizes), *array.shape[axis + 1 :])
    dtype = jnp.int8 if array.dtype == jnp.bool_ else array.dtype
    placed = lax.dynamic_update_slice_in_dim(
        jnp.zeros(shape, dtype), array.astype(dtype), starts[scope.replica_id()], axis
    )
    return lax.psum(placed, REPLICA_AXIS).astype(array.dtype)
