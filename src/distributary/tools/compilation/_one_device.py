"""Runs programs of many replicas on one device.

Every `shard_map` is replaced by all replicas side by side. With two replicas

    { lambda ; w:f32[] x:f32[4]. let
        d:f32[] = shard_map[in_specs=(P(), P("replica")) out_specs=(P(),)
          jaxpr={ lambda ; e:f32[] f:f32[2]. let
              g:f32[2] = mul f e
              h:f32[] = reduce_sum g
              i:f32[] = psum[replica] h
            in (i,) }
        ] w x
      in (d,) }

is evaluated as

    { lambda ; w:f32[] x:f32[4]. let
        d:f32[2] e:f32[2] = split[axis=0 sizes=(2, 2)] x
        f:f32[2] = mul d w
        g:f32[] = reduce_sum f
        h:f32[2] = mul e w
        i:f32[] = reduce_sum h
        j:f32[] = add g i
      in (j,) }
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, Nest, shard_dim
from distributary.errors import UnsupportedError
from distributary.jaxprs import (
    AnyJaxpr,
    Equation,
    evaluate_one,
    has_replicas,
    interpret_with,
    plain_call_of,
)
from distributary.programs import evaluate_jointly


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
