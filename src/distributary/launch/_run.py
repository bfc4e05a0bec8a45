"""Runs a job from beginning to end."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from distributary.errors import UnsupportedError
from distributary.launch._environment import replaced_settings
from distributary.launch._link import Link, LocalLink
from distributary.launch._master import Master
from distributary.launch._options import LaunchOptions
from distributary.launch._output import Output
from distributary.launch._overview import Overview
from distributary.launch._remote_link import RemoteLink
from distributary.launch._signals import Signals
from distributary.launch._supervisor import Supervisor
from distributary.monitoring import Dashboard, serve

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
    supervisor: Supervisor | None = None
    link: Link | None = None
    master: Master | None = None

    def status() -> str:
        return "" if supervisor is None else supervisor.status()

    def should_not_wait() -> bool:
        return supervisor is not None and supervisor.should_not_wait()

    output = Output(stdout_fd, stderr_fd, environ, status)
    try:
        for sentence in replaced_settings(environ, options):
            output.say(sentence)
        # Until the first worker starts, signals have their usual effect.
        if options.hosts is not None and options.is_first_host:
            master = Master(options, output.say)
        link = _link(options)
        with Signals() as signals:
            supervisor = Supervisor(options, environ, link, output, signals)
            others = master.tasks if master is not None else dict
            overview = Overview(options, supervisor.tasks, others)
            with _dashboard(options, overview) as dashboard:
                if dashboard is not None:
                    output.say(f"The dashboard is at {dashboard.url}")
                return supervisor.run()
    finally:
        if link is not None:
            link.close()
        if master is not None:
            master.close()
        output.close(should_not_wait)


def _dashboard(
    options: LaunchOptions, overview: Overview
) -> AbstractContextManager[Dashboard | None]:
    if options.dashboard_port is None:
        return nullcontext()
    port, address = options.dashboard_port, options.dashboard_address
    return serve(overview.numbers, overview.describe, port, address)


def _link(options: LaunchOptions) -> Link:
    if options.hosts is None:
        return LocalLink(options.max_restarts)
    return RemoteLink(options.hosts, options.devices_per_worker)
