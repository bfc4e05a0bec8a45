"""Starts, watches and stops the processes of a job: a supervisor, not a scheduler.

The command `distributary launch` is built on it. `import distributary` does not import this
package.
"""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.launch._options import HostOptions, LaunchOptions

if TYPE_CHECKING:
    from distributary.launch._http import Answer, HttpServer
    from distributary.launch._report import (
        Numbers,
        finite,
        misspelled,
        numbers_of,
        rates,
        refuse_job,
        report,
        report_progress,
        size_of_job,
    )
    from distributary.launch._supervisor import run
    from distributary.launch._worker import ALLOCATOR_SETTINGS, RESTART_VARIABLE, free_addresses

__all__ = ["HostOptions", "LaunchOptions", "report", "run"]  # for users

# Imported on first use: the command line checks its options without JAX.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "_http": "Answer HttpServer",
            "_report": (
                "Numbers finite misspelled numbers_of rates refuse_job report report_progress"
                " size_of_job"
            ),
            "_supervisor": "run",
            "_worker": "ALLOCATOR_SETTINGS RESTART_VARIABLE free_addresses",
        },
    )
