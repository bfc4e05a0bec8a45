"""Starts, watches and stops the processes of a job: a supervisor, not a scheduler.

The command `distributary launch` is built on it. `import distributary` does not import this
package.
"""

from distributary.launch._options import HostOptions, LaunchOptions
from distributary.launch._status import report, report_progress
from distributary.launch._supervisor import run
from distributary.launch._worker import ALLOCATOR_SETTINGS, free_addresses

__all__ = [
    "ALLOCATOR_SETTINGS",
    "HostOptions",
    "LaunchOptions",
    "free_addresses",
    "report",
    "report_progress",
    "run",
]
