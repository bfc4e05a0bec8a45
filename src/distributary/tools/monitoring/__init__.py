"""Shows a run: on a page, as numbers in files, and in profiles of some steps."""

from typing import TYPE_CHECKING

from distributary._late import late_names

if TYPE_CHECKING:
    from distributary.tools.monitoring._dashboard import StatisticsLogger, dashboard, profile
    from distributary.tools.monitoring._page import Dashboard, serve
else:  # imported on first use: the launcher serves the page without JAX
    __getattr__ = late_names(
        __name__, {"_dashboard": "StatisticsLogger dashboard profile", "_page": "Dashboard serve"}
    )

__all__ = ["Dashboard", "StatisticsLogger", "dashboard", "profile", "serve"]
