"""Rewrites of programs that XLA:CPU runs slowly."""

from distributary.xla_cpu._partial_sums import with_exchanged_sums, with_partial_sums
from distributary.xla_cpu._rewrites import (
    is_for_cpus,
    rewritten_for_cpus,
    with_cpu_rewrites,
)
