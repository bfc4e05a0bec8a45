"""Starts, watches and stops the processes of a job: a supervisor, not a scheduler.

The command `distributary launch` is built on it. `import distributary` does not import this
package.
"""

from distributary.launch._environment import ALLOCATOR_SETTINGS, TOKEN_VARIABLE, free_addresses
from distributary.launch._options import HostOptions, LaunchOptions
from distributary.launch._run import run
from distributary.launch._status import report, report_progress

__all__ = [
    "ALLOCATOR_SETTINGS",
    "TOKEN_VARIABLE",
    "HostOptions",
    "LaunchOptions",
    "free_addresses",
    "report",
    "report_progress",
    "run",
]
