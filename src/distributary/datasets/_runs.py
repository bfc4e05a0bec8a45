"""The shapes of a dataset's elements, as far as they are known without reading any."""

from typing import Any

from distributary.datasets._elements import Batch, Prefetch
from distributary.datasets._nodes import Node
from distributary.datasets._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distributary.datasets._order import WithOptions
from distributary.datasets._structure import TensorSpec, map_specs

# A number of elements, None for no end, and the nest of `TensorSpec` that describes them.
Run = tuple[int | None, Any]


def runs_of(node: Node) -> list[Run] | None:
    """Returns the elements of every pass, with consecutive ones of the same shapes together.

    None if only reading the elements would tell.
    """
    while isinstance(node, (Prefetch, WithOptions)):
        node = node.input
    batch = node if isinstance(node, Batch) and node.padding is None else None
    rows = node if batch is None else batch.input
    spec, count = rows.fixed_spec(), rows.cardinality()
    if spec is None or count == UNKNOWN_CARDINALITY:
        return None

    def of_rows(size: int) -> Any:
        return map_specs(lambda row: TensorSpec((size, *row.shape), row.dtype), spec)

    if count == INFINITE_CARDINALITY:
        return [(None, spec if batch is None else of_rows(batch.size))]
    if batch is None:
        return [(count, spec)]
    whole, rest = divmod(count, batch.size)
    last = [(1, of_rows(rest))] if rest and not batch.drop_remainder else []
    return [(whole, of_rows(batch.size)), *last]
