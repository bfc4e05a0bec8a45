"""Runs a job from beginning to end."""

import contextlib
import os
from collections.abc import Mapping

from distributary.errors import UnsupportedError
from distributary.launch._environment import replaced_settings
from distributary.launch._job import Tasks
from distributary.launch._link import Link, LocalLink, RemoteLink
from distributary.launch._master import Master
from distributary.launch._options import LaunchOptions
from distributary.launch._output import Output
from distributary.launch._overview import describe, numbers_of
from distributary.launch._signals import Signals
from distributary.launch._supervisor import Supervisor
from distributary.monitoring import serve

__all__ = ["run"]


def run(
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] | None = None,
    stdout_fd: int = 1,
    stderr_fd: int = 2,
) -> int:
    """Runs a job on this host, and returns its exit code when none of its processes is left.

    Call it in the main thread, because it handles signals: SIGINT, SIGTERM and SIGHUP end the job.

    Args:
        options: The job.
        environ: Environment of the workers; `os.environ` by default.
        stdout_fd: Descriptor for the workers' stdout.
        stderr_fd: Descriptor for the workers' stderr and for messages.

    Returns:
        0 if all workers have ended with exit code 0, or else the exit code of the worker that
        failed first. If a signal ended that worker or the launcher, 128 + the signal's number.

    Raises:
        LaunchError: if the hosts do not find each other.
        UnsupportedError: on Windows.
        OSError: if a worker cannot be started, or a log file cannot be opened.
    """
    if os.name != "posix":
        raise UnsupportedError(
            "launch: the launcher needs process groups, which Windows does not have. Run it on"
            " Linux, or in WSL."
        )
    environ = dict(os.environ if environ is None else environ)
    if options.log_dir is not None:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    signals = Signals(options.grace_seconds + 1)
    output = Output(stdout_fd, stderr_fd, environ, signals.want_end_now)
    with contextlib.ExitStack() as stack:
        stack.callback(output.close)
        for sentence in replaced_settings(environ, options):
            output.say(sentence)
        master: Master | None = None
        # Until the first worker starts, signals have their usual effect.
        if options.hosts is None:
            link: Link = LocalLink(options.max_restarts)
        else:
            if options.is_first_host:
                master = Master(options, output.say)
                stack.callback(master.close)
            link = RemoteLink(options.hosts, options.devices_per_worker)
        stack.callback(link.close)
        stack.enter_context(signals)
        supervisor = Supervisor(options, environ, link, output, signals)
        output.status = supervisor.status
        if options.dashboard_port is not None:

            def tasks() -> dict[int, Tasks]:
                rank = 0 if options.hosts is None else options.hosts.host_rank
                return {rank: supervisor.tasks(), **({} if master is None else master.tasks())}

            dashboard = serve(
                lambda: numbers_of(tasks()),
                lambda: describe(options, tasks()),
                options.dashboard_port,
                options.dashboard_address,
            )
            stack.enter_context(dashboard)
            output.say(f"The dashboard is at {dashboard.url}")
        return supervisor.run()
