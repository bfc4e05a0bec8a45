"""What a traced step must not do, and the text by which workers compare their steps."""

# Not public: what it imports is what other packages use.
# ruff: noqa: F401
# mypy: implicit-reexport

from distributary.check._description import Line, describe_jaxpr, describe_value
from distributary.check._divergence import (
    check_collectives,
    has_collective,
    is_collective,
    is_of_devices,
    is_sum_of_replicas,
    refuse_collectives,
    varying_outputs,
    varying_variables,
)
from distributary.check._numbering import Numbering
