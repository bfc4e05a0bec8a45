"""Shows a run: on a page, as numbers in files, and in profiles of some steps."""

from typing import TYPE_CHECKING

from distributary._late import late_names

if TYPE_CHECKING:
    from distributary.tools.monitoring._dashboard import (
        Dashboard,
        StatisticsLogger,
        dashboard,
        serve,
    )
    from distributary.tools.monitoring._profile import profile

__all__ = ["Dashboard", "StatisticsLogger", "dashboard", "profile", "serve"]

# Imported on first use: the command line checks its options without JAX.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {"_dashboard": "Dashboard StatisticsLogger dashboard serve", "_profile": "profile"},
    )
