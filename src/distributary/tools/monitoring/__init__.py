"""Shows a run: on a page, as numbers in files, and in profiles of some steps."""

from distributary.tools.monitoring._dashboard import Dashboard, StatisticsLogger, dashboard, serve
from distributary.tools.monitoring._profile import profile

__all__ = ["Dashboard", "StatisticsLogger", "dashboard", "profile", "serve"]
