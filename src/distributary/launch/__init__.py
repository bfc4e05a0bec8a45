"""Starts, watches and stops the processes of a job: a supervisor, not a scheduler.

The command `distributary launch` is built on it. `import distributary` does not import this
package.
"""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.launch._options import HostOptions, LaunchOptions

if TYPE_CHECKING:
    from distributary.launch._report import numbers_of, refuse_job, report, report_progress
    from distributary.launch._restarts import Tasks
    from distributary.launch._supervisor import count_running, run
    from distributary.launch._worker import (
        ALLOCATOR_SETTINGS,
        RESTART_VARIABLE,
        Numbers,
        free_addresses,
        misspelled,
    )
else:  # imported on first use: the command line checks its options without JAX
    __getattr__ = late_names(
        __name__,
        {
            "_report": "numbers_of refuse_job report report_progress",
            "_restarts": "Tasks",
            "_supervisor": "count_running run",
            "_worker": "ALLOCATOR_SETTINGS RESTART_VARIABLE Numbers free_addresses misspelled",
        },
    )

__all__ = ["HostOptions", "LaunchOptions", "report", "run"]  # for users
