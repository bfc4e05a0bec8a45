"""Turns a function whose replicas run on several devices into the program of one device.

Values outside of the replicas are the same on all devices, and each device computes them. So

    { lambda ; w:f32[] x:f32[4]. let
        c:f32[] = mul w 2.0
        d:f32[] = shard_map[in_specs=(P(), P("replica")) out_specs=(P(),)
          jaxpr={ lambda ; e:f32[] f:f32[2]. let
              g:f32[2] = mul f e
              h:f32[] = reduce_sum g
              i:f32[] = psum[replica] h
            in (i,) }
        ] c x
      in (d,) }

becomes one flat program with collectives, of which every device runs a copy:

    { lambda ; w:f32[] x:f32[4]. let
        c:f32[] = mul w 2.0
        d:i32[] = axis_index[replica]
        e:i32[] = mul d 2
        f:f32[2] = dynamic_slice[slice_sizes=(2,)] x e
        g:f32[2] = mul f c
        h:f32[] = reduce_sum g
        i:f32[] = psum[replica] h
      in (i,) }

Passes that divide programs, such as `_split`, then see the equations of the replicas.
"""

from collections.abc import Iterable, Sequence
from typing import final

import jax
from jax import Array, lax
from jax.extend.core import Jaxpr

from distributary.devices import REPLICA_AXIS, shard_dim
from distributary.errors import UnsupportedError
from distributary.jaxprs import (
    AnyJaxpr,
    Equation,
    aval_of,
    call_of,
    evaluate_one,
    has_replicas,
    interpret_with,
    open_jaxpr,
    opened,
    shape_of,
)


def per_device(
    jaxpr: Jaxpr, is_split: Sequence[bool], num_replicas: int
) -> tuple[Jaxpr, list[Array]]:
    """Returns the program that each of the devices runs, over the axis `"replica"`.

    Args:
        jaxpr: The function, without markers and constants.
        is_split: For every input `[replica, *shape]`, whether a device has only its row of it,
            `[*shape]`.
        num_replicas: Number of devices.

    Returns:
        The program, whose outputs are the same on all devices, and values of its first inputs,
        which come before those of the function.

    Raises:
        UnsupportedError: for replicas inside `jax.lax.scan`, `cond` and `while_loop`.
    """
    avals = [
        jax.ShapeDtypeStruct(shape_of(v)[1:] if split else shape_of(v), aval_of(v).dtype)
        for v, split in zip(jaxpr.invars, is_split, strict=True)
    ]

    def run(*args: Array) -> list[Array]:
        values = [
            _Value(array[None], 0) if split else _Value(array)
            for array, split in zip(args, is_split, strict=True)
        ]
        return _evaluated(jaxpr, values)

    closed = jax.make_jaxpr(run, axis_env=[(REPLICA_AXIS, num_replicas)])(*avals)
    return opened(closed), closed.consts


@final
class _Value:
    """A value on every device.

    Args:
        array: The array that this device has.
        dim: The dim of which this device has a part; None if it has the whole.
    """

    def __init__(self, array: Array, dim: int | None = None) -> None:
        self._array = array
        self._dim = dim
        self._whole = array if dim is None else None

    def whole(self) -> Array:
        """Returns the whole value, gathered if need be."""
        if self._whole is None:
            self._whole = lax.all_gather(self._array, REPLICA_AXIS, axis=self._dim, tiled=True)
        return self._whole

    def part(self, dim: int, num_replicas: int) -> Array:
        """Returns this device's part of the value along a dim."""
        if dim == self._dim:
            return self._array
        size = self.whole().shape[dim] // num_replicas
        start = lax.axis_index(REPLICA_AXIS) * size
        return lax.dynamic_slice_in_dim(self.whole(), start, size, dim)


def _evaluated(jaxpr: AnyJaxpr, args: Sequence[_Value]) -> list[Array]:
    return [value.whole() for value in interpret_with(jaxpr, args, _Value, _results)[0]]


def _results(eqn: Equation, operands: Sequence[_Value]) -> Iterable[_Value]:
    if eqn.primitive.name == "shard_map":
        return _of_replica(eqn, operands)
    if not has_replicas([eqn]):
        return map(_Value, evaluate_one(eqn, [operand.whole() for operand in operands]))
    call = call_of(eqn)
    if call is None:
        raise UnsupportedError(
            f"Strategy.run inside jax.lax.{eqn.primitive.name} in a function that is scheduled on"
            " workers with several devices is not supported. Call it outside of the loop or branch."
        )
    return map(_Value, _evaluated(call, operands))


def _of_replica(eqn: Equation, operands: Sequence[_Value]) -> list[_Value]:
    num_replicas = eqn.params["mesh"].size
    inputs = []
    for operand, spec in zip(operands, eqn.params["in_specs"], strict=True):
        dim = shard_dim(spec)
        inputs.append(operand.whole() if dim is None else operand.part(dim, num_replicas))
    outs = jax.core.eval_jaxpr(*open_jaxpr(eqn.params["jaxpr"]), *inputs)
    return [
        _Value(out, shard_dim(spec))
        for out, spec in zip(outs, eqn.params["out_specs"], strict=True)
    ]
