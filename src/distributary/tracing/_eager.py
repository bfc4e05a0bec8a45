"""Records what JAX computes outside of a trace, so that a tape can differentiate it.

    with tf.GradientTape() as tape:
        y = w * w                      mul a a -> b       (`w` was read as a)
        z = tf.sin(y) + 1              sin b -> c, add c 1.0 -> d

Each operation is computed at once, and recorded with the arrays that it takes and gives. `gradient`
follows the records from the sources to the targets, and differentiates a function that does the
same again. The second time that the same operations are recorded, as in the next turn of a training
loop, this function is compiled.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from distributary.devices import Nest, alias_of, all_params, recorded_by
from distributary.errors import UnsupportedError
from distributary.jaxprs import Equation, open_jaxpr
from distributary.tracing._interpreter import reached_inputs


class _Operation(NamedTuple):
    call: Callable[..., Any]
    key: Hashable  # equal for calls that do the same; None if that is not known
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    params: Mapping[str, Any]


# Jaxprs keep the arrays alive, so identities are enough.
_captured_by: "weakref.WeakKeyDictionary[Any, frozenset[int]]" = weakref.WeakKeyDictionary()


def _captured(operation: "_Operation | Equation") -> frozenset[int]:
    """Returns the identities of the arrays that functions in the parameters have closed over."""
    found: set[int] = set()
    for value in all_params(operation.params).values():
        for jaxpr in value if isinstance(value, (tuple, list)) else [value]:
            if not isinstance(jaxpr, (Jaxpr, ClosedJaxpr)):
                continue
            if jaxpr not in _captured_by:
                ids = frozenset(map(id, open_jaxpr(jaxpr)[1]))
                _captured_by[jaxpr] = ids.union(*map(_captured, jaxpr.eqns))
            found |= _captured_by[jaxpr]
    return frozenset(found)


class _Read(NamedTuple):
    """A read of a variable: an array, and the numbers of its rows if only those were read."""

    array: jax.Array
    ids: jax.Array | None = None
    shape: tuple[int, ...] = ()


def _joined(parts: Sequence[tuple[Any, _Read]]) -> Any:
    """Returns the sum of the gradients of several reads; a pair if all are of rows."""
    if not parts:
        return None
    rows = [
        (part.reshape(-1, *read.shape[1:]), jnp.ravel(read.ids))
        for part, read in parts
        if read.ids is not None
    ]
    if len(rows) == len(parts):
        return tuple(map(jnp.concatenate, zip(*rows, strict=True)))
    dense = [part for part, read in parts if read.ids is None]
    total = sum(dense[1:], dense[0])
    for part, ids in rows:
        total = total.at[ids].add(part)
    return total


class _State(threading.local):
    """The records of this thread, one for each open tape; tapes begin and end in any order."""

    def __init__(self) -> None:
        self.records: list[EagerRecord] = []
        self.context: Any = None


_state = _State()


@final
class EagerRecord:
    """The operations of one tape."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        # By the identity of a variable: the variable, and how it was read.
        self._reads: dict[int, tuple[Any, list[_Read]]] = {}

    def mark(self, event: str) -> None:
        """Starts or ends recording what this thread computes."""
        if event in ("stop", "pause"):
            _state.records.remove(self)
            if not _state.records:
                _state.context.__exit__(None, None, None)
            return
        if not _state.records:
            _state.context = recorded_by(_report)
            _state.context.__enter__()
        _state.records.append(self)

    def note(self, operation: _Operation) -> None:
        """Records an operation."""
        self._operations.append(operation)

    def note_read(self, variable: object, read: "_Read") -> None:
        """Notes that a variable was read."""
        self._reads.setdefault(id(variable), (variable, []))[1].append(read)

    def variables(self) -> list[Any]:
        """Returns the variables that were read."""
        return [variable for variable, _ in self._reads.values()]

    def gradient(
        self,
        targets: Sequence[jax.Array],
        seeds: Sequence[jax.Array],
        arrays: Sequence[jax.Array],
        variables: Sequence[Any],
    ) -> list[Any]:
        """Returns the gradients for arrays and variables; None for those without influence.

        If only rows of a variable were read, the result is a pair: of rows, and of their numbers.
        """
        groups = [[_Read(array)] for array in arrays]
        groups += [self._reads.get(id(variable), (None, []))[1] for variable in variables]
        sources = {id(read.array): read.array for group in groups for read in group}
        gradients = self._of_arrays([*sources.values()], targets, seeds)
        gradient_of = dict(zip(sources, gradients, strict=True))
        results = []
        for group in groups:
            parts = [(gradient_of[id(read.array)], read) for read in group]
            results.append(_joined([(part, read) for part, read in parts if part is not None]))
        return results

    def _of_arrays(
        self, sources: Sequence[jax.Array], targets: Sequence[jax.Array], seeds: Sequence[jax.Array]
    ) -> Sequence[Any]:
        """Returns the gradients for arrays that are different objects."""
        path = self._path(sources, targets)
        program = _Program(path, sources, targets)
        known = _Known() if program.key is None else _known(program.key)
        if known.reached is None:
            targets_of = lambda *sources: program.again(sources, program.constants)
            known.reached = reached_inputs(jax.make_jaxpr(targets_of)(*program.sources).jaxpr)
            function = _gradients(program.again, known.reached)
        else:
            known.compiled = known.compiled or jax.jit(_gradients(program.again, known.reached))
            function = known.compiled
        gradients = iter(function(program.sources, program.constants, list(seeds)))
        return [next(gradients) if is_reached else None for is_reached in known.reached]

    def _path(self, sources: Sequence[Any], targets: Sequence[Any]) -> list[_Operation]:
        """Returns the operations between sources and targets."""
        active = {id(source) for source in sources}
        forward = []
        for operation in self._operations:
            takes_outside = not active.isdisjoint(_captured(operation))
            if takes_outside or any(id(x) in active for x in operation.inputs):
                forward.append((operation, takes_outside))
                active.update(map(id, operation.outputs))
        needed = {id(target) for target in targets}
        path = []
        for operation, takes_outside in reversed(forward):
            if any(id(x) in needed for x in operation.outputs):
                if takes_outside:
                    raise UnsupportedError(
                        "GradientTape.gradient: a function of jax.jit, or one with its own"
                        " gradient, takes an array from outside that depends on a source, and"
                        " holds it as a constant. Pass the array as an argument, or compile the"
                        " block with distributary.function."
                    )
                path.append(operation)
                needed.update(id(x) for x in operation.inputs if id(x) in active)
        return path[::-1]


# A call, the places of its operands and of its results, and for each result the place of what is
# added to it.
_Step: TypeAlias = tuple[Callable[..., Any], list[int], list[tuple[int, int | None]]]


class _Program:
    """A function of the sources that does again what was recorded.

    A source that is itself a result is an input that is zero and added to the result, so that
    gradients pass through it.

    Attributes:
        key: Equal for programs that do the same; None if that is not known.
        sources: The inputs.
        constants: Arrays that do not depend on the sources.
        again: From the sources and constants to the targets; keeps no array alive.
    """

    def __init__(
        self, path: Sequence[_Operation], sources: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        self.constants: list[Any] = []
        places: dict[int, int] = {}  # constants have negative numbers

        def place_of(value: object) -> int:
            if id(value) not in places:
                self.constants.append(value)
                places[id(value)] = -len(self.constants)
            return places[id(value)]

        output_ids = {id(output) for operation in path for output in operation.outputs}
        self.sources = [jnp.zeros_like(s) if id(s) in output_ids else s for s in sources]
        added = {id(source): i for i, source in enumerate(sources) if id(source) in output_ids}
        places.update((id(s), i) for i, s in enumerate(sources) if id(s) not in output_ids)
        steps: list[_Step] = []
        count = len(sources)
        for operation in path:
            operands = [place_of(value) for value in operation.inputs]
            results = []
            for output in operation.outputs:
                places[id(output)] = count
                results.append((count, added.get(id(output))))
                count += 1
            steps.append((operation.call, operands, results))
        ends = [place_of(target) for target in targets]
        self.again = functools.partial(_again, steps, ends)
        keys = tuple([operation.key for operation in path])
        what = tuple([(tuple(places), str(results)) for _, places, results in steps])
        dtypes = tuple([getattr(x, "dtype", type(x)) for x in (*sources, *self.constants)])
        self.key = None if None in keys else (keys, what, dtypes, tuple(ends))


def _again(
    steps: Sequence[_Step], ends: Sequence[int], sources: Sequence[Any], constants: Sequence[Any]
) -> list[Any]:
    """Does again what was recorded, and returns the targets."""
    values: dict[int, Any] = dict(enumerate(sources))
    values.update((-i, constant) for i, constant in enumerate(constants, start=1))
    for call, operands, results in steps:
        outputs = call(*[values[place] for place in operands])
        for (number, added), value in zip(results, outputs, strict=True):
            values[number] = value if added is None else value + values[added]
    return [values[end] for end in ends]


def _gradients(again: Callable[..., list[Any]], wanted: Sequence[bool]) -> Callable[..., Any]:
    """Returns a function of sources, constants and weights of the targets."""

    def function(sources: Nest, constants: Nest, weights: Nest) -> Any:
        _, pull = jax.vjp(lambda *sources: again(sources, constants), *sources)
        return [*itertools.compress(pull(weights), wanted)]

    return function


class _Known:
    """A program that was asked for before: what it reaches, and its compiled form."""

    reached: list[bool] | None = None
    compiled: Callable[..., Any] | None = None


@functools.lru_cache(maxsize=128)
def _known(key: Hashable) -> _Known:
    return _Known()


def _report(
    call: Callable[..., Any],
    key: Hashable,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    params: Mapping[str, Any],
) -> None:
    operation = _Operation(call, key, inputs, outputs, params)
    for record in _state.records:
        record.note(operation)


def is_recording() -> bool:
    """Returns whether a tape records what this thread computes."""
    return bool(_state.records)


def noted_read(variable: object, array: jax.Array) -> jax.Array:
    """Returns the value that a variable is read as, which tapes know as such."""
    if not _state.records or isinstance(array, jax.core.Tracer):  # Keras infers shapes
        return array
    # A new object: variables that were assigned from one array are different sources.
    return _noted(variable, _Read(alias_of(array)))


def noted_rows(variable: object, array: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows of a table that are read, which tapes know as such."""
    rows = jnp.take(array, ids, axis=0)
    return _noted(variable, _Read(rows, ids, array.shape)) if _state.records else rows


def _noted(variable: object, read: _Read) -> jax.Array:
    for record in _state.records:
        record.note_read(variable, read)
    return read.array
