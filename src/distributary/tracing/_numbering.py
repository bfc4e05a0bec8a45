"""Which values the replicas of an uneven batch compute alike.

On an uneven batch every replica has a program of its own, in which the number of its rows and its
replica id are constants. The divergence analysis looks at one program and takes constants for equal
on all replicas; this module compares the programs. Values get equal numbers if they are computed
from equal values in the same way (global value numbering).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distributary.tracing._connectivity import call_of
from distributary.tracing._divergence import has_collective
from distributary.tracing._markers import Array, Equation, open_jaxpr


@final
class Numbering:
    """Numbers of the values of several programs; equal numbers mean equal values.

    Args:
        simplify: From an equation with one result and the numbers of its operands to the number of
            the result, where more is known of it than what it is computed from; else to None.
    """

    def __init__(
        self, simplify: Callable[[Equation, Sequence[int]], int | None] | None = None
    ) -> None:
        self._simplify = simplify
        self._numbers: dict[Hashable, int] = {}
        self._num_joined = 0

    def outputs(self, jaxpr: Any, inputs: Sequence[Hashable]) -> list[int]:
        """Numbers of the outputs of one program.

        Args:
            jaxpr: Program of one replica, without markers and constants.
            inputs: For every input, something equal to that of the other programs if it holds the
                same value there.
        """
        self._num_joined = 0
        return self._jaxpr(jaxpr, [], [self.input(key) for key in inputs])

    def input(self, key: Hashable) -> int:
        """The number of an input; see `outputs`."""
        return self._number(("input", key))

    def constant(self, value: Array) -> Hashable:
        """Something equal for equal constants."""
        if isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return id(value)
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _jaxpr(self, jaxpr: Any, consts: Sequence[Array], operands: Sequence[int]) -> list[int]:
        numbers = [self._number(self.constant(const)) for const in consts]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*numbers, *operands), strict=True))

        def lookup(atom: Any) -> int:
            if isinstance(atom, jex_core.Literal):
                aval: Any = atom.aval
                return self._number(self.constant(np.asarray(atom.val, aval.dtype)))
            return env[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, tuple([lookup(atom) for atom in eqn.invars]))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [lookup(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Equation, operands: tuple[int, ...]) -> list[int]:
        if self._simplify is not None and len(eqn.outvars) == 1:
            known = self._simplify(eqn, operands)
            if known is not None:
                return [known]
        call = call_of(eqn)
        if call is not None:
            return self._jaxpr(*open_jaxpr(call), operands)
        key: Hashable
        if has_collective(eqn):
            # The replicas meet here; whether the result is the same on all of them is the matter
            # of the divergence analysis.
            key = ("joined", self._num_joined)
            self._num_joined += 1
        else:
            opened = [open_jaxpr(sub) for sub in jex_core.jaxprs_in_params(eqn.params)]
            nested = tuple(
                [
                    tuple(self._jaxpr(jaxpr, consts, range(-len(jaxpr.invars), 0)))
                    for jaxpr, consts in opened
                ]
            )
            params = tuple((name, _plain(value)) for name, value in sorted(eqn.params.items()))
            key = (eqn.primitive.name, params, operands, nested)
        return [self._number((key, i)) for i in range(len(eqn.outvars))]


def _plain(value: Any) -> Hashable:
    """A parameter of an equation in a form that can be compared between programs."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr)) or (
        callable(value) and not isinstance(value, type)
    ):
        return type(value).__name__
    try:
        hash(value)
    except TypeError:
        return type(value).__name__
    return value
