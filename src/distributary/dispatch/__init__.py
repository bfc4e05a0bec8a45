"""How programs reach the devices: their order, how many are in flight, times and Ctrl-C."""

from distributary.dispatch._dispatcher import Dispatcher, dispatcher_for
from distributary.dispatch._gathering import fetch_whole
from distributary.dispatch._interrupts import interrupts
from distributary.dispatch._job_events import JobEvent, job_programs
from distributary.dispatch._latest import latest_program
from distributary.dispatch._progress import Fit, progress
from distributary.dispatch._threads import call_after, call_when_collected, start_thread
from distributary.dispatch._timing import ProgramTimer

__all__ = [
    "Dispatcher",
    "Fit",
    "JobEvent",
    "ProgramTimer",
    "call_after",
    "call_when_collected",
    "dispatcher_for",
    "fetch_whole",
    "interrupts",
    "job_programs",
    "latest_program",
    "progress",
    "start_thread",
]
