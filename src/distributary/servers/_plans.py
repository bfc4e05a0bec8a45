"""Plans: what workers and servers do for every closure of a function.

The coordinator makes them once for a function and shapes of data, and sends them as JSON. A closure
is then no more than its number, its arguments and the number of the function.
"""

import functools
import hashlib
import json
from dataclasses import astuple, dataclass
from typing import TypeAlias, final

from distributary.servers._rows import UpdatedRows
from distributary.servers._table_rows import RowPlan

#: The origin of an input of a program: a kind and a number; see `WorkerPlan.inputs`.
Origin: TypeAlias = tuple[str, int]


@final
@dataclass(frozen=True)
class Update:
    """The work of a server on values that a worker pushes.

    The coordinator defines it; workers only refer to it, by its name.

    Attributes:
        program: Name of the program that computes new states from states and pushed values.
        states: Numbers of the variables that it reads.
        outputs: Numbers of the variables that it changes.
        rows: The states, pushed values and outputs that are only rows of tables.
    """

    program: str
    states: list[int]
    outputs: list[int]
    rows: list[UpdatedRows]

    @functools.cached_property
    def name(self) -> str:
        """A hash of the update, so that two functions with the same update share it."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()


@final
@dataclass(frozen=True, slots=True)
class Push:
    """The values that a worker pushes to one server at the end of a closure.

    Attributes:
        server: Number of the server.
        update: Name of the update that they are for.
        values: Their positions among the pushed values.
        rows: Those that are only rows of tables.
    """

    server: int
    update: str
    values: list[int]
    rows: list[UpdatedRows]


@final
@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The work of a worker for a closure.

    Attributes:
        program: Name of the program that it runs.
        inputs: The origin of each input of the program. `("data", i)` is the i-th leaf of the data
            of all sources; `("replicas", i)` is that leaf and the following ones, one per replica;
            `("argument", i)` is a leaf of the arguments; `("state", n)` is variable n;
            `("constant", i)` is one of the arrays that the function has captured; `("rows", i)`
            holds the rows of the i-th buffer of `rows`; `("position", i)` says where the numbers of
            the i-th lookup are among these rows.
        num_results: Number of outputs that are returned. They come first; the others are pushed.
        pulls: The numbers of the variables that it reads as a whole, for each server.
        pushes: The values that it pushes, for each server.
        rows: The tables of which it takes only rows; None if there are none.
    """

    program: str
    inputs: list[Origin]
    num_results: int
    pulls: list[tuple[int, list[int]]]
    pushes: list[Push]
    rows: RowPlan | None
