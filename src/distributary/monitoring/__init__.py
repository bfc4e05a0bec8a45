"""Shows a run: on a page, as numbers in files, and in profiles of some steps."""

from distributary.monitoring._dashboard import Dashboard, StatisticsLogger, dashboard, serve
from distributary.monitoring._numbers import numbers_of
from distributary.monitoring._profile import profile
from distributary.monitoring._server import Answer, HttpServer
from distributary.monitoring._summaries import Summaries, SummaryWriter

__all__ = [
    "Answer",
    "Dashboard",
    "HttpServer",
    "StatisticsLogger",
    "Summaries",
    "SummaryWriter",
    "dashboard",
    "numbers_of",
    "profile",
    "serve",
]
