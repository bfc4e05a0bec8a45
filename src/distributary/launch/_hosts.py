"""The launchers of all hosts, which meet at host 0: the server there runs the `Job` that decides.

A job on a single host decides for itself, without a connection. With several hosts, the launchers
first prove to each other that they know the token of the job:

    host 0                          other host
      challenge (random) ------------->
      <------------- hello, with another challenge and a proof
      welcome, with a proof, or refused ------------>

The proofs cover the address that the other host has called. What follows is neither encrypted nor
signed, like the connections of the workers.
"""

import contextlib
import errno
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, final

from distributary.cluster_resolver import parse_address
from distributary.errors import LaunchError
from distributary.job import (
    Channel,
    ChannelClosedError,
    ConnectionAcceptor,
    Message,
    connected,
    is_proof,
    listening,
    new_challenge,
    proof,
)
from distributary.launch import _restarts as restarts
from distributary.launch._options import HostOptions, LaunchOptions

_PROTOCOL = 8
_SILENT_SECONDS = 20  # after which the other machine is taken to be gone
_ANSWER_SECONDS = 10.0
_WAITING_SECONDS = 5.0  # before it says which hosts it waits for
_LAST_CALL_SECONDS = 30.0  # for hosts without which the job can start
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 5.0  # for hosts to notice the end


@final
class LocalLink:
    """The link of a job on a single host, which decides for itself.

    Args:
        max_restarts: Number of times that the job is started again.
    """

    address = "127.0.0.1"

    def __init__(self, max_restarts: int) -> None:
        self._job = restarts.Job(1, max_restarts)
        self._commands = [command for _, command in self._job.join(0)]

    def fileno(self) -> int:
        """Returns -1: no need to wait, because `receive` has the results of `send` at once."""
        return -1

    def send(self, report: restarts.Report) -> None:
        """Passes a report to the job, which decides."""
        self._commands.extend(command for _, command in self._job.report(0, report))

    def receive(self) -> Iterator[restarts.Command]:
        """Yields the decisions that have not been yielded before."""
        while self._commands:
            yield self._commands.pop(0)

    def close(self) -> None:
        """Does nothing: there is no connection."""


@final
class RemoteLink:
    """A connection to the master on host 0, which must be made before a deadline.

    Args:
        hosts: The place of this host.
        devices_per_worker: CPU devices of each worker, which must be the same on all hosts.

    Attributes:
        address: Address of this host for the workers of other hosts.

    Raises:
        LaunchError: if the master cannot be reached, or refuses this host.
    """

    def __init__(self, hosts: HostOptions, devices_per_worker: int | None) -> None:
        self._hosts = hosts
        self._channel = _connected(hosts)
        try:
            self._channel.keep_alive(_SILENT_SECONDS)
            self.address = hosts.address or self._channel.own_address()
            self._shake_hands(devices_per_worker)
        except BaseException as error:
            self._channel.close()
            if not isinstance(error, OSError):
                raise
            raise LaunchError(
                f"launch: {error}. Check that the launcher of host 0 listens there, and not"
                " another program."
            ) from error

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when something arrives; -1 when closed.

        Commands that arrived with the handshake are already read: call `receive` before you wait.
        """
        return self._channel.fileno()

    def send(self, report: restarts.Report) -> None:
        """Sends a report; it is lost if the master has gone, in which case `receive` raises.

        `Interrupted` is the last report.
        """
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(*restarts.encode(report))
        if isinstance(report, restarts.Interrupted):
            self._channel.shut()

    def receive(self) -> Iterator[restarts.Command]:
        """Yields the commands that have arrived. After `Exit`, no more reports follow.

        Raises:
            LaunchError: after the last of them, if the master has gone.
        """
        if self._channel.fileno() < 0:
            return
        try:
            for message in self._channel.arrived():
                command = restarts.decode(message)
                if isinstance(command, restarts.Exit):
                    self._channel.shut()
                yield command
        except ChannelClosedError as error:
            raise LaunchError(
                f"lost the connection to the launcher of host 0 at {self._hosts.master}"
            ) from error

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def _shake_hands(self, devices_per_worker: int | None) -> None:
        hosts = self._hosts
        challenge = self._answer("challenge")
        own_challenge = new_challenge()
        hello = {
            "protocol": _PROTOCOL,
            "host_rank": hosts.host_rank,
            "nnodes": hosts.nnodes,
            "devices_per_worker": devices_per_worker,
            "called": self._channel.called_address(is_caller=True),
        }
        shown = proof(hosts.token, "host", challenge, own_challenge, hello)
        self._channel.send("hello", [hello, own_challenge, shown])
        shown = self._answer("welcome")
        if not is_proof(shown, hosts.token, "master", own_challenge, challenge):
            raise LaunchError(
                f"launch: the program that listens at {hosts.master} does not know the token of"
                " this job. Does another job use this address?"
            )

    def _answer(self, kind: str) -> Any:
        message = self._channel.receive(_ANSWER_SECONDS)
        if message.kind == "refused":
            raise LaunchError(
                f"launch: the master at {self._hosts.master} refuses host"
                f" {self._hosts.host_rank}: {message.content}"
            )
        if message.kind != kind:
            raise ChannelClosedError(
                f"{self._channel.peer} sent an unexpected message, {message.kind!r:.100}"
            )
        return message.content


Link: TypeAlias = LocalLink | RemoteLink


def _connected(hosts: HostOptions) -> Channel:
    host, port = parse_address(hosts.master, "launch: the master address")
    try:
        return connected(host, port, f"the program at {hosts.master}", hosts.join_seconds)
    except OSError as error:
        raise LaunchError(
            f"launch: host {hosts.host_rank} could not reach the master at {hosts.master}"
            f" within {hosts.join_seconds:g} s: {error}. Does host 0 run the same command"
            " with --node-rank 0?"
        ) from error


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
        self._job = restarts.Job(self._hosts.num_hosts, options.max_restarts, self._hosts.min_hosts)
        # Used by the thread only, like the job.
        self._challenges = weakref.WeakKeyDictionary[Channel, str]()
        self._channels: dict[int, Channel] = {}
        self._complete_at = time.monotonic()
        self._has_said_who_is_missing = False
        self._tasks: dict[int, restarts.Tasks] = {}  # of the other hosts; any thread may read it
        self._server = _listen(self._hosts)
        self._thread = threading.Thread(target=self._serve, name="launch-master", daemon=True)
        self._thread.start()

    def tasks(self) -> dict[int, restarts.Tasks]:
        """Returns the tasks of the other hosts, at most a second old."""
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
            ConnectionAcceptor(self._server, self._hosts.num_hosts, self._challenge) as acceptor,
        ):
            while not self._is_done():
                for channel, message in acceptor.messages(time.monotonic() + _POLL_SECONDS):
                    host = next((h for h, c in self._channels.items() if c is channel), None)
                    if host is not None:
                        self._receive(host, message)
                    elif message is not None and self._admit(channel, message):
                        acceptor.keep(channel)
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
        """Ends the job if hosts that it needs have been missing for too long."""
        if not self._job.is_short:
            self._complete_at = time.monotonic()
            self._has_said_who_is_missing = False
            return
        seconds = time.monotonic() - self._complete_at
        missing = _enumerate(self._job.missing)
        if seconds > min(_LAST_CALL_SECONDS, self._hosts.join_seconds):
            self._send(self._job.stop_waiting())
            if not self._job.is_short:
                return
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

    def _challenge(self, channel: Channel) -> None:
        self._challenges[channel] = new_challenge()
        with contextlib.suppress(OSError):  # `ConnectionAcceptor` will notice that it has gone
            channel.keep_alive(_SILENT_SECONDS)
            channel.send("challenge", self._challenges[channel])

    def _admit(self, channel: Channel, message: Message) -> bool:
        """Returns whether the other end is a host of this job; if so, it has joined."""
        try:
            called = channel.called_address(is_caller=False)
            host, answer = self._checked(message, self._challenges[channel], called)
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

    def _checked(self, message: Message, challenge: str, called: str) -> tuple[int, str]:
        """Returns the rank of a host that may join, and our own proof."""
        try:
            hello, own_challenge, shown = message.content
        except (TypeError, ValueError):
            raise _RefusedError("it does not speak the launcher's protocol") from None
        token = self._hosts.token
        if not is_proof(shown, token, "host", challenge, own_challenge, hello):
            raise _RefusedError("its token is not the token of this job")
        if hello["protocol"] != _PROTOCOL:
            raise _RefusedError("it runs another version of distributary")
        if hello["called"] != called:
            raise _RefusedError(
                f"it has called {hello['called']!r:.60}, and the master listens at {called}: a"
                " program in between passes the connection on. Give all hosts that address of"
                " host 0, or end the other program"
            )
        host = int(hello["host_rank"])
        for option, theirs, ours in (
            ("--nnodes", hello["nnodes"], self._hosts.nnodes),
            ("--devices-per-worker", hello["devices_per_worker"], self._devices_per_worker),
        ):
            if theirs != ours:
                raise _RefusedError(f"host {host} has {option} {theirs}, host 0 has {ours}")
        if host in self._channels:
            raise _RefusedError(f"--node-rank {host} is taken by {self._channels[host].peer}")
        if self._job.is_over:
            raise _RefusedError("the job is over")
        return host, proof(token, "master", own_challenge, challenge)

    def _receive(self, host: int, message: Message | None) -> None:
        """Handles a message of a host; None means that the host has gone."""
        if message is None:
            peer = self._channels.pop(host).peer
            self._tasks.pop(host, None)
            text = f"lost the connection to the launcher of host {host} ({peer})"
            self._send(self._job.lose(host, text))
            return
        try:
            report = restarts.decode(message)
        except ValueError as error:
            self._say(f"host {host}: {error}")
            self._channels[host].shut()  # None comes next
            return
        if isinstance(report, restarts.Tasks):
            self._tasks[host] = report
        else:
            self._send(self._job.report(host, report))

    def _send(self, commands: list[tuple[int, restarts.Command]]) -> None:
        if self._job.missing and any(isinstance(c, restarts.Start) for _, c in commands):
            self._say(f"starting without {_enumerate(self._job.missing)}, which may join later.")
        for host, command in commands:
            if host in self._channels:
                with contextlib.suppress(ChannelClosedError):  # None comes next
                    self._channels[host].send(*restarts.encode(command))


def _listen(hosts: HostOptions) -> socket.socket:
    """Returns a socket that listens on the master's address, and on no other one."""
    address = parse_address(hosts.master, "launch: the master address")
    end = time.monotonic() + hosts.join_seconds
    while True:
        try:
            return listening(*address)
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
