"""Shows a run: on a page, as numbers in files, and in profiles of some steps."""

from typing import TYPE_CHECKING

from distributary._late import late_names

if TYPE_CHECKING:
    from distributary.tools.monitoring._dashboard import StatisticsLogger, dashboard
    from distributary.tools.monitoring._page import Dashboard, serve
    from distributary.tools.monitoring._profile import profile
else:  # imported on first use: the launcher serves the page without JAX
    __getattr__ = late_names(
        __name__,
        {
            "_dashboard": "StatisticsLogger dashboard",
            "_page": "Dashboard serve",
            "_profile": "profile",
        },
    )

__all__ = ["Dashboard", "StatisticsLogger", "dashboard", "profile", "serve"]
