"""Finds the values that the replicas of an uneven batch compute alike, by global value numbering.

On an uneven batch every replica has a program of its own, in which its replica id and its number of
rows are constants. The divergence analysis looks at one program and assumes that constants are
equal on all replicas; this module compares the programs. Values get equal numbers if they are
computed from equal values in the same way. For replicas with 3 and 2 rows:

    { lambda ; a:f32[3] w:f32[]. let        { lambda ; a:f32[2] w:f32[]. let
        b:f32[] = reduce_sum a                  b:f32[] = reduce_sum a
        c:f32[] = psum[replica] b               c:f32[] = psum[replica] b    equal
        d:f32[] = div c 3.0                     d:f32[] = div c 2.0          not equal
        e:f32[] = sub w d                       e:f32[] = sub w d            not equal
        f:f32[] = mul w 2.0                     f:f32[] = mul w 2.0          equal
      in (e, f) }                             in (e, f) }

`e` would be another value on each replica, although it is computed from a sum of both.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params

from distributary.tracing._divergence import has_collective
from distributary.tracing._jaxprs import AnyJaxpr, Equation, call_of, interpret_with, open_jaxpr


@final
class Numbering:
    """Numbers of the values of several programs; equal numbers mean equal values.

    Args:
        simplify: Called with an equation that has one result, and the numbers of its operands.
            Returns the number of the result if more is known of it than its operands tell, such as
            that it is zero; else None.
    """

    def __init__(
        self, simplify: Callable[[Equation, Sequence[int]], int | None] | None = None
    ) -> None:
        self._simplify = simplify
        self._numbers: dict[Hashable, int] = {}
        self._num_joined = 0

    def outputs(self, jaxpr: Jaxpr, inputs: Sequence[Hashable]) -> list[int]:
        """Returns the numbers of the outputs of one program.

        Args:
            jaxpr: Program of one replica, without markers and constants.
            inputs: A key for every input; inputs of several programs have equal keys if they hold
                the same value.
        """
        self._num_joined = 0
        return self._jaxpr(jaxpr, [self.input(key) for key in inputs])

    def input(self, key: Hashable) -> int:
        """Returns the number of the input with this key; see `outputs`."""
        return self._number(("input", key))

    def constant(self, value: Array | np.ndarray) -> Hashable:
        """Returns a key that is equal for equal constants."""
        if isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return id(value)
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _jaxpr(self, jaxpr: AnyJaxpr, operands: Sequence[int]) -> list[int]:
        number = lambda value: self._number(self.constant(value))
        return interpret_with(jaxpr, operands, number, self._equation)[0]

    def _equation(self, eqn: Equation, operands: Sequence[int]) -> list[int]:
        if self._simplify is not None and len(eqn.outvars) == 1:
            known = self._simplify(eqn, operands)
            if known is not None:
                return [known]
        call = call_of(eqn)
        if call is not None:
            return self._jaxpr(call, operands)
        key: Hashable
        if has_collective(eqn):
            # The replicas meet here. The divergence analysis finds out whether the result is the
            # same on all of them.
            key = ("joined", self._num_joined)
            self._num_joined += 1
        else:
            nested = tuple(
                [
                    tuple(self._jaxpr(inner, range(-len(open_jaxpr(inner)[0].invars), 0)))
                    for inner in jaxprs_in_params(eqn.params)
                ]
            )
            params = tuple((name, _plain(value)) for name, value in sorted(eqn.params.items()))
            key = (eqn.primitive.name, params, tuple(operands), nested)
        return [self._number((key, i)) for i in range(len(eqn.outvars))]


def _plain(value: Any) -> Hashable:
    """Returns a parameter of an equation in a form that can be compared between programs."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, (Jaxpr, ClosedJaxpr)) or (callable(value) and not isinstance(value, type)):
        return type(value).__name__
    try:
        hash(value)
    except TypeError:
        return type(value).__name__
    return value
