"""The server on host 0 at which the launchers of all hosts meet; it runs their `Job`."""

import contextlib
import errno
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, final

from distributary.errors import LaunchError
from distributary.job import (
    Channel,
    ChannelClosedError,
    Message,
    Reception,
    is_proof,
    new_challenge,
    proof,
)
from distributary.launch._job import Command, Job, Tasks, decode, encode
from distributary.launch._link import PROTOCOL, SILENT_SECONDS
from distributary.launch._options import HostOptions, LaunchOptions, split_address

__all__ = ["Master"]

_WAITING_SECONDS = 5.0  # before it says which hosts it waits for
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 5.0  # for hosts to notice the end


@final
class _RefusedError(Exception):
    """A connection that does not belong to the job; the text is sent to the other side."""


@final
class Master:
    """A thread that lets the hosts join and tells them what to do.

    Args:
        options: The job, with the hosts.
        say: Shows a line to the user; called from any thread.

    Raises:
        LaunchError: if it cannot listen on the address.
    """

    def __init__(self, options: LaunchOptions, say: Callable[[str], None]) -> None:
        assert options.hosts is not None
        self._hosts = options.hosts
        self._devices_per_worker = options.devices_per_worker
        self._say = say
        self._job = Job(self._hosts.num_hosts, options.max_restarts)
        # Used by the thread only, like the job.
        self._challenges = weakref.WeakKeyDictionary[Channel, str]()
        self._channels: dict[int, Channel] = {}
        self._complete_at = time.monotonic()
        self._has_said_who_is_missing = False
        self._tasks: dict[int, Tasks] = {}  # of the other hosts; any thread may read it
        self._wants_tasks = options.dashboard_port is not None
        self._server = _listen(self._hosts)
        self._thread = threading.Thread(target=self._serve, name="launch-master", daemon=True)
        self._thread.start()

    def tasks(self) -> dict[int, Tasks]:
        """Returns the tasks of the other hosts, at most a second old, if there is a dashboard."""
        return dict(self._tasks)

    def close(self) -> None:
        """Waits a few seconds until all hosts have noticed the end of the job.

        If the job is not over, they notice when this process ends.
        """
        if self._job.is_over:
            self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        with (
            self._server,
            Reception(self._server, self._hosts.num_hosts, self._greet) as reception,
        ):
            while not self._is_done():
                for channel, message in reception.messages(time.monotonic() + _POLL_SECONDS):
                    host = self._host_of(channel)
                    if host is not None:
                        self._hear(host, message)
                    elif message is not None and self._lets_in(channel, message):
                        reception.keep(channel)
                    else:
                        channel.close()
                    if self._is_done():
                        break
                if not self._job.is_over:
                    self._watch()

    def _is_done(self) -> bool:
        """Returns whether the job is over and all hosts have noticed it."""
        return self._job.is_over and not self._channels

    def _watch(self) -> None:
        """Ends the job if hosts have been missing for too long."""
        if not self._job.missing:
            self._complete_at = time.monotonic()
            self._has_said_who_is_missing = False
            return
        seconds = time.monotonic() - self._complete_at
        missing = _enumerate(self._job.missing)
        if seconds > self._hosts.join_seconds:
            here = [f"host {rank} ({c.peer})" for rank, c in sorted(self._channels.items())]
            self._send(
                self._job.fail(
                    f"{missing} of {self._hosts.num_hosts} did not join at"
                    f" {self._hosts.master} within {self._hosts.join_seconds:g} s; joined:"
                    f" {', '.join(here) or 'none'}"
                )
            )
        elif seconds > _WAITING_SECONDS and not self._has_said_who_is_missing:
            self._has_said_who_is_missing = True
            self._say(f"waiting for {missing} to join at {self._hosts.master}.")

    def _greet(self, channel: Channel) -> None:
        self._challenges[channel] = new_challenge()
        with contextlib.suppress(OSError):  # `Reception` will notice that it has gone
            channel.keep_alive(SILENT_SECONDS)
            channel.send("challenge", self._challenges[channel])

    def _host_of(self, channel: Channel) -> int | None:
        return next((host for host, c in self._channels.items() if c is channel), None)

    def _lets_in(self, channel: Channel, message: Message) -> bool:
        """Returns whether the other end is a host of this job; if so, it has joined."""
        try:
            host, answer = self._checked(message, self._challenges[channel])
            channel.send("welcome", answer)
        except _RefusedError as error:
            self._say(f"refused a connection from {channel.peer}: {error}")
            with contextlib.suppress(ChannelClosedError):
                channel.send("refused", str(error))
            return False
        except ChannelClosedError:
            return False
        self._channels[host] = channel
        self._send(self._job.join(host))
        return True

    def _checked(self, message: Message, challenge: str) -> tuple[int, list[Any]]:
        """Returns the rank of a host that may join, and the answer that it gets."""
        try:
            hello, own_challenge, shown = message.content
        except (TypeError, ValueError):
            raise _RefusedError("it does not speak the launcher's protocol") from None
        token = self._hosts.token
        if not is_proof(shown, token, "host", challenge, own_challenge, hello):
            raise _RefusedError("its token is not the token of this job")
        if hello["protocol"] != PROTOCOL:
            raise _RefusedError("it runs another version of distributary")
        host = int(hello["host_rank"])
        for option, theirs, ours in (
            ("--nnodes", hello["num_hosts"], self._hosts.num_hosts),
            ("--devices-per-worker", hello["devices_per_worker"], self._devices_per_worker),
        ):
            if theirs != ours:
                raise _RefusedError(f"host {host} has {option} {theirs}, host 0 has {ours}")
        if host in self._channels:
            raise _RefusedError(f"--node-rank {host} is taken by {self._channels[host].peer}")
        if self._job.is_over:
            raise _RefusedError("the job is over")
        welcome = {"wants_tasks": self._wants_tasks and host != 0}
        return host, [welcome, proof(token, "master", own_challenge, challenge, welcome)]

    def _hear(self, host: int, message: Message | None) -> None:
        """Handles a message of a host; None means that the host has gone."""
        if message is None:
            peer = self._channels.pop(host).peer
            self._tasks.pop(host, None)
            text = f"lost the connection to the launcher of host {host} ({peer})"
            self._send(self._job.lose(host, text))
            return
        try:
            report = decode(message)
        except ValueError as error:
            self._say(f"host {host}: {error}")
            self._channels[host].shut()  # None comes next
            return
        if isinstance(report, Tasks):
            self._tasks[host] = report
        else:
            self._send(self._job.report(host, report))

    def _send(self, commands: list[tuple[int, Command]]) -> None:
        for host, command in commands:
            if host in self._channels:
                with contextlib.suppress(ChannelClosedError):  # None comes next
                    self._channels[host].send(*encode(command))


def _listen(hosts: HostOptions) -> socket.socket:
    """Returns a socket that listens on the master's address, and on no other one."""
    name, port = split_address(hosts.master)
    end = time.monotonic() + hosts.join_seconds
    while True:
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            return socket.create_server(address, family=family)
        except OSError as error:
            # The name of a Kubernetes pod is published only some time after the pod has started.
            is_early = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            if not is_early or time.monotonic() >= end:
                reason = str(error.strerror).partition(" (")[0]  # `create_server` adds the address
                raise LaunchError(
                    f"launch: host 0 cannot listen on the master address {hosts.master}: {reason}."
                    " Give an address of host 0 and a free port."
                ) from error
        time.sleep(_POLL_SECONDS)


def _enumerate(hosts: list[int]) -> str:
    return ("host " if len(hosts) == 1 else "hosts ") + ", ".join(map(str, hosts))
