"""Checks of a machine, and of the links between the tasks of a cluster.

The command `distributary doctor` is built on it. `import distributary` does not import this
package.
"""

from distributary.diagnosis._all_reduce import all_reduce_seconds, format_bytes
from distributary.diagnosis._check import Check, Json
from distributary.diagnosis._examination import PARTS, Report, examine
from distributary.diagnosis._links import Link, loopback

__all__ = [
    "PARTS",
    "Check",
    "Json",
    "Link",
    "Report",
    "all_reduce_seconds",
    "examine",
    "format_bytes",
    "loopback",
]
