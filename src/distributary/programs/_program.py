"""The state and the captures of traced functions that have become programs of global arrays."""

import abc
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr

from distributary.jaxprs import Array
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
