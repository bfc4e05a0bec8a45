"""Checks of a machine, and of the links between the tasks of a cluster.

The command `distributary doctor` is built on it. `import distributary` does not import this
package.
"""

from typing import TYPE_CHECKING

from distributary._late import late_names

if TYPE_CHECKING:
    from distributary.tools.diagnosis._all_reduce import all_reduce_seconds
    from distributary.tools.diagnosis._check import Check, Json
    from distributary.tools.diagnosis._examination import PARTS, Report, examine
    from distributary.tools.diagnosis._links import Link, loopback
    from distributary.tools.diagnosis._machine import described_devices

__all__ = [
    "PARTS",
    "Check",
    "Json",
    "Link",
    "Report",
    "all_reduce_seconds",
    "described_devices",
    "examine",
    "loopback",
]

# Imported on first use: the command line shows its help without JAX.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "_all_reduce": "all_reduce_seconds",
            "_check": "Check Json",
            "_examination": "PARTS Report examine",
            "_links": "Link loopback",
            "_machine": "described_devices",
        },
    )
