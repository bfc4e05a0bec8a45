"""Steps of workers that read different data, where some workers may have less of it."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.tree_util import PyTreeDef

from distributary._types import Nest
from distributary.errors import InvalidValueError, ReplicaMismatchError
from distributary.inputs._coworkers import Coworkers, Leaves, parts_of, signature_of_specs
from distributary.inputs._step_data import StepData

# A number of consecutive steps, None for no end, and their signature.
SignedRun = tuple[int | None, str]


@final
@dataclass(frozen=True)
class Ready:
    """The data that a worker has for a step.

    Attributes:
        signature: Signature of the parts.
        tree: Structure of a part.
        parts: Returns nests of arrays, one per replica of this worker.
        values: The values of the step if the parts of all replicas of all workers have the same
            shapes; None if not even the parts of this worker do.
    """

    signature: str
    tree: PyTreeDef
    parts: Callable[[], Iterable[Any]]
    values: Any


@final
class AgreedSteps:
    """The steps of one pass: as many as the worker with the most data has.

    Before each step, in the thread that takes it, every worker learns the shapes of all parts. If
    the workers know the shapes of their datasets in advance, they meet only once. Workers that have
    no data left get parts without rows.

    Args:
        source: The data of this worker.
        coworkers: All workers that take the steps.
        place: Name of the pass.
        number: Number of the first step.
        finish: Turns the parts of all replicas, on every worker, into the values of a step.
    """

    def __init__(
        self,
        source: StepData,
        coworkers: Coworkers,
        place: str,
        number: int,
        finish: Callable[[list[Nest]], Any],
    ) -> None:
        self._source = source
        self._coworkers = coworkers
        self._job = coworkers.job
        self._place = place
        self._first = self._number = number
        self._finish = finish
        self._began = False
        self._known: list[Iterator[str]] | None = None
        self._tree: PyTreeDef = None
        self._over = False

    def next(self, take: Callable[[], Ready]) -> Any:
        """Returns the values of the next step; `take` returns this worker's data for it.

        Raises:
            StopIteration: when no worker has data left.
            ClusterError: if another worker failed, or takes other steps.
            ReplicaMismatchError: if the parts do not fit together.
        """
        if self._over:
            raise StopIteration
        if not self._began:
            self._begin()
        ready: Ready | None = None

        def say() -> str:
            nonlocal ready
            try:
                ready = take()
            except StopIteration:
                return ""
            self._tree = ready.tree
            return ready.signature

        if self._known is None:
            told = self._job.agree(f"step {self._number} of {self._place}", say)
        else:
            told = [next(signatures, "") for signatures in self._known]
            self._check_known(say(), told[self._job.number])
        self._number += 1
        first = max(told)
        if not first:
            self._over = True
            raise StopIteration
        if ready is not None and ready.values is not None and told.count(first) == len(told):
            return ready.values
        return self._uneven(told, ready)

    def _begin(self) -> None:
        self._began = True
        told = self._job.agree(f"the start of {self._place}", self._signed_runs)
        if None not in told:
            self._known = [_signatures(runs, self._first) for runs in told]

    def _signed_runs(self) -> list[SignedRun] | None:
        runs = self._source.runs()
        if runs is None:
            return None
        return [(count, signature_of_specs(parts)) for count, parts in runs]

    def _check_known(self, own: str, announced: str) -> None:
        if own != announced:
            raise InvalidValueError(
                f"Step {self._number} of {self._place} has the shapes {own or '(no data)'}, but"
                f" {announced or '(no data)'} was announced. Did its files or arrays change?"
            )

    def _uneven(self, told: list[str], ready: Ready | None) -> Any:
        if self._number == self._first + 1 and "" in told:
            # Workers that never had data must learn the structure of a part.
            self._job.agree(f"the structure of {self._place}", self._find_tree)
        signatures = [parts_of(text) for text in told if text]
        tree, parts = signatures[0]
        for name, text in zip(self._job.names, told, strict=True):
            other = parts_of(text)[0] if text else tree
            if other != tree:
                raise ReplicaMismatchError(
                    f"Step {self._number - 1} of {self._place}: {name} has elements of structure"
                    f" {other}, another worker has {tree}; all must have the same structure."
                )
        nothing: tuple[Leaves, ...] = ()
        if "" in told:
            nothing = (self._without_rows(parts[0]),) * self._coworkers.num_parts
        leaves = [part for text in told for part in (parts_of(text)[1] if text else nothing)]
        own: list[list[Any]] = []
        if ready is not None:
            own = [jax.tree.leaves(part) for part in ready.parts()]
        elif self._tree is None:
            self._find_tree()
        what = f"step {self._number - 1} of {self._place}"
        columns = [
            self._coworkers.gather(
                what, [part[i] for part in leaves], [arrays[i] for arrays in own]
            )
            for i in range(len(leaves[0]))
        ]
        return self._finish(
            [jax.tree.unflatten(self._tree, part) for part in zip(*columns, strict=True)]
        )

    def _find_tree(self) -> None:
        self._tree = jax.tree.structure(self._source.spec())

    def _without_rows(self, leaves: Leaves) -> Leaves:
        if any(not shape for _, shape in leaves):
            raise InvalidValueError(
                f"Step {self._number - 1} of {self._place}: a worker has no data left, and the"
                " elements are scalars, which cannot be empty. Batch them, or give every worker the"
                " same number of elements."
            )
        return tuple((dtype, (0, *shape[1:])) for dtype, shape in leaves)


def _signatures(runs: Sequence[SignedRun], skipped: int) -> Iterator[str]:
    """Yields the signatures of steps, starting at number `skipped`."""
    for count, text in runs:
        if count is None:
            yield from itertools.repeat(text)
        else:
            yield from itertools.repeat(text, max(0, count - skipped))
            skipped = max(0, skipped - count)
