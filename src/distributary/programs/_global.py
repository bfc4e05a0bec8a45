"""The program of a step of the global view: traced once on a whole batch, and partitioned by XLA.

The step of `fit` sees the batch as on one device. Its rows are sharded over the replicas and every
variable has a sharding, so XLA divides the program and adds the collectives. Six rows on four
devices come in padded to eight, and

    { lambda ; w:f32[2] x:f32[6,2]. let       { lambda ; w:f32[2] x:f32[8,2]. let
        c:f32[6] = dot_general x w                y:f32[6,2] = slice[limit_indices=(6, 2)] x
      in (c,) }                           ->      z:f32[6,2] = sharding_constraint[P("replica")] y
                                                  c:f32[6] = dot_general z w
                                                in (c,) }

XLA pads `z` again, but inside of its own operations, so the step never sees that.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, num_logical_devices, shard_dim, shard_spec
from distributary.jaxprs import (
    Array,
    Equation,
    Version,
    aval_of,
    computed_from,
    rewritten,
    variables_of,
    walk,
)
from distributary.programs._program import TracedProgram, laid_out
from distributary.programs._stages import cut, uncut
from distributary.tracing import Handle, Pure, Subject, gather_p, trace

#: Returns a function that evaluates a jaxpr in a form that its devices run fast, given for every
#: input the dim that counts the rows of the batch, or None.
RewriteWhole: TypeAlias = Callable[[ClosedJaxpr, Sequence[int | None]], Callable[..., list[Array]]]


@final
class GlobalProgram(TracedProgram):
    """A step that sees the whole batch, as a function of global arrays.

    Args:
        function: From the arguments to a flat list of arrays.
        avals: Shapes and dtypes of the arguments, without padding.
        dims: For every argument, the dim along which its rows are sharded, or None.
        mesh: Mesh with the axis `"replica"`; None leaves the device to JAX.
        keeps_rows: Whether results stay sharded by rows where these divide; else every device has
            the whole results.
        data: For every argument, whether the mesh computes everything that depends on it. What
            depends only on other arguments, on variables, and on sums that `all_reduce` has marked
            then comes after it, once; see `cut_around_mesh`. None leaves everything to the mesh.
        rewrite: Makes the function run faster.
        subject: What its user knows the function as.
    """

    is_rewritten = True

    def __init__(
        self,
        function: Callable[..., Sequence[Array]],
        avals: Sequence[Any],
        dims: Sequence[int | None],
        mesh: Any,
        *,
        keeps_rows: bool,
        data: Sequence[bool] | None,
        rewrite: RewriteWhole,
        subject: Subject,
    ) -> None:
        pure, _ = trace(function, avals, "replica", subject, replica=0)
        super().__init__([pure])
        self._rewrite = rewrite
        self._mesh = None if mesh is None or (mesh.size == 1 and data is None) else mesh
        self._divides_rows = self._mesh is None or not _is_miscounted(pure, self._mesh)
        self._keeps_rows = keeps_rows
        self._is_staged = data is not None
        self._avals = list(avals)
        num_given = len(pure.captures) + len(pure.handles)
        self._dims: list[int | None] = [*[None] * num_given, *dims]
        self._stages = uncut(pure.jaxpr)
        if data is not None:
            varying = [*[False] * num_given, *data]
            self._stages = cut(pure.jaxpr, varying, max(2, self.num_replicas))

    @property
    def num_replicas(self) -> int:
        """Number of replicas that share the rows."""
        return 1 if self._mesh is None else int(self._mesh.shape[REPLICA_AXIS])

    @property
    def has_first_output_everywhere(self) -> bool:
        """True if every device computes the whole first result."""
        return self.makes_first_output and not self._keeps_rows

    def _run(
        self, captures: Sequence[Sequence[Array]], state: dict[Handle, Array], args: Sequence[Any]
    ) -> tuple[list[Array], list[Any]]:
        """Runs the step; the arguments are padded to a multiple of the number of replicas."""
        (pure,), stages = self.pures, self._stages
        stored = [_read(handle, state[handle]) for handle in pure.handles]
        num_given = len(pure.captures) + len(stored)
        rows = map(self._rows, args, self._avals, self._dims[num_given:])
        values = [*captures[0], *stored, *rows]
        run = self._rewrite(stages.replica, [self._dims[i] for i in stages.replica_inputs])
        outputs = run(*(values[i] for i in stages.replica_inputs))
        if self._is_staged:
            outputs = [self._whole(value) for value in outputs]
        results = stages.complete(values, outputs)
        outs = [self._result(results[k]) for k in range(self.num_outs)]
        divided = self._computed_from_parts()
        new = []
        for k, handle in enumerate(pure.written, self.num_outs):
            value = results[k]
            is_divided = not divided.isdisjoint(variables_of([pure.jaxpr.outvars[k]]))
            if is_divided and shard_dim(handle.parts) is None:
                # XLA then gathers new weights and not the state they are computed from.
                spec = shard_spec(jnp.shape(value), self.num_replicas, handle.parts)
                value = laid_out(value, self._mesh, spec)
            new.append(_written(handle, value))
        return new, outs

    def _rows(self, value: Array, aval: Any, dim: int | None) -> Array:
        if dim is None or self._mesh is None:
            return value
        if not self._divides_rows:
            return laid_out(lax.slice_in_dim(value, 0, aval.shape[dim], axis=dim), self._mesh, P())
        if value.shape != aval.shape:
            value = lax.slice_in_dim(value, 0, aval.shape[dim], axis=dim)
            if num_logical_devices(self._mesh) > 1:
                # XLA (jaxlib 0.10.2) adds gradients of its padding to row 0 of a divided table.
                return laid_out(value, self._mesh, P())
        return laid_out(value, self._mesh, P(*[None] * dim, REPLICA_AXIS))

    def _result(self, value: Any) -> Array:
        value = jnp.asarray(value)  # some constants of JAX are no arrays
        if not self._keeps_rows or not value.ndim or value.shape[0] % self.num_replicas:
            return self._whole(value)
        return laid_out(value, self._mesh, P(REPLICA_AXIS))

    def _whole(self, value: Any) -> Array:
        return laid_out(jnp.asarray(value), self._mesh, P())

    def _computed_from_parts(self) -> set[Any]:
        """Returns what depends on state of which every device holds a part."""
        jaxpr, first = self.jaxpr, len(self.captures[0])
        stored = zip(self.handles, jaxpr.invars[first:], strict=False)
        parts = [v for handle, v in stored if shard_dim(handle.parts) is not None]
        # What the step gathers is whole.
        return computed_from(jaxpr.eqns, parts, lambda eqn: eqn.primitive is not gather_p)


def _is_miscounted(pure: Pure, mesh: Any) -> bool:
    """Returns whether XLA would add up a gradient of a step wrongly, if rows were divided.

    If several devices have the same rows, XLA (jaxlib 0.10.2) counts the gradient of the kernel of
    a convolution once for each of them, if it is stored in parts of its window.
    """
    if num_logical_devices(mesh) == 1:
        return False
    eqns = [eqn for eqn in walk(pure.jaxpr.eqns) if eqn.primitive is lax.conv_general_dilated_p]
    num_dims = {len(eqn.params["dimension_numbers"].out_spec) for eqn in eqns}
    kernels = [handle for handle in pure.handles if len(handle.shape) in num_dims]
    windows = [tuple(kernel.parts)[: len(kernel.shape) - 2] for kernel in kernels]
    return any(map(any, windows))


def _read(handle: Handle, stored: Array) -> Array:
    """Returns the value of a variable in the step: the aggregated one, if replicas have theirs."""
    return handle.cell()._of_rows(stored) if handle.per_replica else stored


def _written(handle: Handle, value: Array) -> Array:
    """Returns what is stored as the new value of a variable."""
    return handle.cell()._parts_of(value) if handle.per_replica else value


_WITH_IDS = {
    *(lax.gather_p, lax.scatter_p, lax.scatter_add_p, lax.scatter_sub_p),
    *(lax.scatter_mul_p, lax.scatter_min_p, lax.scatter_max_p),
}


def divisible(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """Returns a closed jaxpr, and the jaxprs inside it, in a form that XLA can divide.

    A program of the whole batch is divided over its devices by XLA, on every platform. With ids
    without a sign, as in the gradient of `jnp.sort`,

        c:f32[8] = gather[...] a b:u32[8,1]

    becomes

        d:i32[8,1] = convert_element_type b
        c:f32[8] = gather[...] a d

    Args:
        closed: The jaxpr.
        mesh: The devices over which XLA divides it.
    """
    has_logical_devices = num_logical_devices(mesh) > 1

    def rule(eqn: Equation, only_transposed: bool) -> Version | None:
        if eqn.primitive in _WITH_IDS:
            return _with_signed_ids(eqn)
        if eqn.primitive is lax.conv_general_dilated_p and has_logical_devices:
            return _whole_convolution(eqn, mesh)
        if eqn.primitive is lax.select_and_scatter_add_p:
            return _with_whole_windows(eqn, mesh)
        if eqn.primitive is lax.pad_p:
            return _cut_after_padding(eqn)
        return None

    return rewritten(closed, rule)


def _with_signed_ids(eqn: Equation) -> Version | None:
    """Returns a gather or scatter with ids of which the partitioner can compute others.

    It (jaxlib 0.10.2 to 0.12) needs 32 bits or more, and a sign.
    """
    dtype = aval_of(eqn.invars[1]).dtype
    if jnp.issubdtype(dtype, jnp.signedinteger) and dtype.itemsize >= 4:
        return None
    # Larger ids are out of bounds, as the largest of 32 bits is.
    most = np.array(min(np.iinfo(dtype).max, np.iinfo(np.int32).max), dtype)

    def bind(x: Array, ids: Array, *updates: Array) -> Array:
        signed = jnp.minimum(ids, most).astype(np.int32)
        result: Array = eqn.primitive.bind(x, signed, *updates, **eqn.params)
        return result

    return bind


def _whole_convolution(eqn: Equation, mesh: Mesh) -> Version | None:
    """Returns a grouped convolution, or the gradient of one, that every device computes.

    The partitioner (jaxlib 0.10.2 to 0.12) may divide it into shapes that do not fit.
    """
    if eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1:
        return None
    return _laid_out_as(eqn, mesh, P())


def _with_whole_windows(eqn: Equation, mesh: Mesh) -> Version:
    """Returns a gradient of max-pooling of which XLA divides no dim along which windows move.

    The partitioner (jaxlib 0.10.2 to 0.12) loses what windows select from the rows of another
    device.
    """
    of_dims = [eqn.params[name] for name in ("window_dimensions", "window_strides", "padding")]
    in_one_row = [values == (1, 1, (0, 0)) for values in zip(*of_dims, strict=True)]
    return _laid_out_as(eqn, mesh, P(*[P.UNCONSTRAINED if one else None for one in in_one_row]))


def _cut_after_padding(eqn: Equation) -> Version | None:
    """Returns a pad that cuts off rows at the beginning of a dim after it has put rows between.

    The partitioner (jaxlib 0.10.2 to 0.12) aborts at one that does both.
    """
    config = eqn.params["padding_config"]
    if not any(low < 0 < between for low, _, between in config):
        return None
    wider = tuple([(max(low, 0), max(high, 0), between) for low, high, between in config])

    def bind(x: Array, value: Array) -> Array:
        wide: Array = lax.pad_p.bind(x, value, padding_config=wider)
        cuts = zip(wide.shape, config, strict=True)
        return wide[tuple([slice(max(-low, 0), n + min(high, 0)) for n, (low, high, _) in cuts])]

    return bind


def _laid_out_as(eqn: Equation, mesh: Mesh, spec: P) -> Version:
    """Returns an equation whose operands and result XLA must give one sharding."""
    fixed = lambda array: laid_out(array, mesh, spec)
    return lambda *operands: fixed(eqn.primitive.bind(*map(fixed, operands), **eqn.params))
