"""Compiler passes that split a step between workers and parameter servers."""

from distributary.servers.passes._parts import in_parts
from distributary.servers.passes._per_device import per_device
from distributary.servers.passes._rows import (
    Lookup,
    RowSpace,
    RowSplit,
    SparseUpdate,
    UpdatedRows,
    bucket_of,
    rows_of,
    rows_of_update,
)
from distributary.servers.passes._servers import (
    ServerPart,
    ServerSplit,
    StepInput,
    split_over_servers,
)

__all__ = [
    "Lookup",
    "RowSpace",
    "RowSplit",
    "ServerPart",
    "ServerSplit",
    "SparseUpdate",
    "StepInput",
    "UpdatedRows",
    "bucket_of",
    "in_parts",
    "per_device",
    "rows_of",
    "rows_of_update",
    "split_over_servers",
]
