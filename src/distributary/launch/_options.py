"""The options of a job, which are checked when you create them."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from distributary.cluster_resolver import parse_address
from distributary.errors import InvalidValueError, checked_int

_ALL_ADDRESSES = ("0.0.0.0", "::")
_MIN_TOKEN_CHARACTERS = 16


@final
@dataclass(frozen=True)
class HostOptions:
    """The place of this host in a job that runs on several hosts.

    Args:
        num_hosts: Number of hosts. Every host runs the launcher with the same options.
        host_rank: Number of this host, from 0. Worker numbers follow the order of the ranks.
        master: `"HOST:PORT"` of host 0, at which the launchers meet. Host 0 listens on this
            address only.
        token: Secret that all hosts share, 16 characters or more.
        join_seconds: Seconds within which all hosts must have joined.
        address: Address of this host for the other hosts; None takes the one from which it reaches
            the master.
        min_hosts: Number of hosts that are enough; None for all. Host 0 is always needed.

    Raises:
        InvalidValueError: for an impossible value.
    """

    num_hosts: int
    host_rank: int
    master: str
    token: str = field(repr=False)
    join_seconds: float = 300.0
    address: str | None = None
    min_hosts: int | None = None

    @property
    def nnodes(self) -> str:
        """The number of hosts as `--nnodes` takes it: `"4"`, or `"2:4"`."""
        return f"{'' if self.min_hosts is None else f'{self.min_hosts}:'}{self.num_hosts}"

    def __post_init__(self) -> None:
        _check_whole(self, num_hosts=1, host_rank=0)
        if self.min_hosts is not None:
            _check_at_most(self, "min_hosts", "num_hosts", "hosts")
        if self.host_rank >= self.num_hosts:
            raise InvalidValueError(
                f"launch: host_rank is {self.host_rank}, but the job has {self.num_hosts} hosts."
                f" Ranks count from 0 to {self.num_hosts - 1}."
            )
        if parse_address(self.master, "launch: the master address").host in _ALL_ADDRESSES:
            raise InvalidValueError(
                f"launch: the master address is {self.master!r}, which stands for every address."
                " Give the one at which the other hosts reach host 0."
            )
        if len(self.token) < _MIN_TOKEN_CHARACTERS:
            raise InvalidValueError(
                f"launch: the token has {len(self.token)} characters, expected"
                f" {_MIN_TOKEN_CHARACTERS} or more. `openssl rand -hex 16` makes one; give all"
                " hosts the same."
            )
        _check_seconds("join_seconds", self.join_seconds)


@final
@dataclass(frozen=True)
class LaunchOptions:
    """A job: one command that every worker runs.

    Args:
        command: Command line of a worker.
        num_workers: Number of workers on this host.
        min_workers: Number of workers that are enough on this host; None for all. If none of them
            finishes a step before one fails, the next attempt has a worker less. After any other
            failure, all start again.
        num_servers: Number of parameter servers. If there are any, there is also a chief. The job
            ends with the chief, and workers and servers that fail are started again alone.
        devices_per_worker: CPU devices of each worker; None leaves this to the environment.
        max_restarts: Number of times that the job, or one of its tasks, is started again after a
            failure.
        grace_seconds: Seconds between TERM and KILL when processes should end.
        log_dir: Folder for one file per worker and attempt; None writes none.
        evaluator: Whether host 0 also runs the task `"evaluator"`.
        tune: Whether workers get the allocator and thread settings of `worker_environ`.
        dashboard_port: Port of a page that shows the workers of this host, or, on host 0, the
            workers of all hosts. 0 takes a free port, None serves no page.
        dashboard_address: Address of this machine on which the page is served.
        hosts: The place of this host among several; None for a job on this machine alone.

    Raises:
        InvalidTypeError: for a number that is not one.
        InvalidValueError: for an impossible value.
    """

    command: tuple[str, ...]
    num_workers: int = 1
    min_workers: int | None = None
    num_servers: int = 0
    devices_per_worker: int | None = None
    max_restarts: int = 0
    grace_seconds: float = 5.0
    log_dir: Path | None = None
    evaluator: bool = False
    tune: bool = True
    dashboard_port: int | None = None
    dashboard_address: str = "127.0.0.1"
    hosts: HostOptions | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidValueError("launch: there is no command to run. Name a Python script.")
        _check_whole(self, num_workers=1, num_servers=0, max_restarts=0)
        if self.devices_per_worker is not None:
            _check_whole(self, devices_per_worker=1)
        if self.num_servers and self.hosts is not None:
            raise InvalidValueError(
                f"launch: num_servers is {self.num_servers} in a job on {self.hosts.num_hosts}"
                " hosts, but jobs with parameter servers are launched on one host only. Start every"
                " task on its host, with TF_CONFIG in its environment."
            )
        elastic = self.hosts is not None and self.hosts.min_hosts is not None
        if self.min_workers is not None:
            _check_at_most(self, "min_workers", "num_workers", "workers")
            elastic = True
            if self.num_servers:
                raise InvalidValueError(
                    f"launch: min_workers is {self.min_workers}, but in a job with parameter"
                    " servers a worker that is lost starts again alone. Give --workers one number."
                )
        if elastic and not self.max_restarts:
            raise InvalidValueError(
                "launch: a job that may lose hosts or workers starts again when it does, but"
                " max_restarts is 0. Give it with --max-restarts."
            )
        _check_seconds("grace_seconds", self.grace_seconds)

    @property
    def host_rank(self) -> int:
        """Number of this host; 0 if the job has one."""
        return 0 if self.hosts is None else self.hosts.host_rank

    @property
    def is_first_host(self) -> bool:
        """True if this host has worker 0."""
        return self.host_rank == 0


def _check_whole(options: object, **smallest_of: int) -> None:
    for name, smallest in smallest_of.items():
        field, value = f"launch: {name}", getattr(options, name)
        checked_int(field, value, f"{smallest} or more", minimum=smallest)


def _check_at_most(options: object, name: str, of: str, what: str) -> None:
    _check_whole(options, **{name: 1})
    value, most = getattr(options, name), getattr(options, of)
    if value > most:
        raise InvalidValueError(
            f"launch: {name} is {value}, but {of} is only {most}. Give {what} as MIN:N."
        )


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InvalidValueError(f"launch: {name} is {value}, expected a number of seconds >= 0.")
