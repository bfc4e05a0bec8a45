"""Steps of workers that read different data, where some workers may have less of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.tree_util import PyTreeDef

from distributary.data._coworkers import Coworkers, Leaves, parts_of
from distributary.data._step_data import StepData
from distributary.devices import Nest
from distributary.errors import InvalidValueError, ReplicaMismatchError


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
@dataclass(eq=False)
class AgreedSteps:
    """The steps of one pass: as many as the worker with the most data has.

    Before each step, in the thread that takes it, every worker learns the shapes of all parts.
    Workers that have no data left get parts without rows.

    Attributes:
        source: The data of this worker.
        coworkers: All workers that take the steps.
        place: Name of the pass.
        number: Number of the next step.
        finish: Turns the parts of all replicas, on every worker, into the values of a step.
    """

    source: StepData
    coworkers: Coworkers
    place: str
    number: int
    finish: Callable[[list[Nest]], Any]

    def __post_init__(self) -> None:
        self._first = self.number
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
        ready: Ready | None = None

        def signature() -> str:
            nonlocal ready
            try:
                ready = take()
            except StopIteration:
                return ""
            self._tree = ready.tree
            return ready.signature

        # Invariant: every worker agrees once per step, also one whose data has ended or failed. So
        # all see the same texts, and take the same way below: a differing one is a deadlock.
        texts = self.coworkers.job.agree(f"step {self.number} of {self.place}", signature)
        self.number += 1
        first = max(texts)
        if not first:
            self._over = True
            raise StopIteration
        if ready is not None and ready.values is not None and texts.count(first) == len(texts):
            return ready.values
        return self._uneven(texts, ready)

    def _uneven(self, texts: list[str], ready: Ready | None) -> Any:
        if self.number == self._first + 1 and "" in texts:
            # Workers that never had data must learn the structure of a part.
            self.coworkers.job.agree(f"the structure of {self.place}", self._find_tree)
        tree, parts = parts_of(max(texts))
        for name, text in zip(self.coworkers.job.names, texts, strict=True):
            other = parts_of(text)[0] if text else tree
            if other != tree:
                raise ReplicaMismatchError(
                    f"Step {self.number - 1} of {self.place}: {name} has elements of structure"
                    f" {other}, another worker has {tree}; all must have the same structure."
                )
        nothing: tuple[Leaves, ...] = ()
        if "" in texts:
            nothing = (self._without_rows(parts[0]),) * self.coworkers.num_parts
        leaves = [part for text in texts for part in (parts_of(text)[1] if text else nothing)]
        replicas: list[list[Any]] = []
        if ready is not None:
            replicas = [jax.tree.leaves(part) for part in ready.parts()]
        elif self._tree is None:
            self._find_tree()
        what = f"step {self.number - 1} of {self.place}"
        columns = [
            self.coworkers.gather(
                what, [part[i] for part in leaves], [arrays[i] for arrays in replicas]
            )
            for i in range(len(leaves[0]))
        ]
        return self.finish(
            [jax.tree.unflatten(self._tree, part) for part in zip(*columns, strict=True)]
        )

    def _find_tree(self) -> None:
        self._tree = jax.tree.structure(self.source.spec())

    def _without_rows(self, leaves: Leaves) -> Leaves:
        if any(not shape for _, shape in leaves):
            raise InvalidValueError(
                f"Step {self.number - 1} of {self.place}: a worker has no data left, and the"
                " elements are scalars, which cannot be empty. Batch them, or give every worker the"
                " same number of elements."
            )
        return tuple((dtype, (0, *shape[1:])) for dtype, shape in leaves)
