"""The connection between the launcher of a host and the `Job` that decides for all hosts."""

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any, TypeAlias, final

from distributary.errors import LaunchError
from distributary.job import Channel, ChannelClosedError, is_proof, new_challenge, proof
from distributary.launch._job import Command, Exit, Interrupted, Job, Report, decode, encode
from distributary.launch._options import HostOptions, split_address

__all__ = ["PROTOCOL", "SILENT_SECONDS", "Link", "LocalLink", "RemoteLink"]

PROTOCOL = 4
SILENT_SECONDS = 20  # after which the other machine is taken to be gone
_TRY_SECONDS = 2.0  # for one attempt to connect
_ANSWER_SECONDS = 10.0
_MAX_LINE_BYTES = 2**16
_PAUSE_SECONDS = 0.1


@final
class LocalLink:
    """The link of a job on a single host, which decides for itself.

    Args:
        max_restarts: Number of times that the job is started again.
    """

    address = "127.0.0.1"
    wants_tasks = False

    def __init__(self, max_restarts: int) -> None:
        self._job = Job(1, max_restarts)
        self._commands = [command for _, command in self._job.join(0)]

    def fileno(self) -> int:
        """Returns -1: no need to wait, because `receive` has the results of `send` at once."""
        return -1

    def send(self, report: Report) -> None:
        """Passes a report to the job, which decides."""
        self._commands.extend(command for _, command in self._job.report(0, report))

    def receive(self) -> Iterator[Command]:
        """Yields the decisions that have not been yielded before."""
        while self._commands:
            yield self._commands.pop(0)

    def close(self) -> None:
        """Does nothing: there is no connection."""


@final
class RemoteLink:
    """A connection to the master on host 0, which must be made before a deadline.

    The launchers first prove to each other that they know the token of the job:

        host 0                          other host
          challenge (random) ------------->
          <------------- hello, with another challenge
          welcome, or refused ------------>

    What follows is neither encrypted nor signed, like the connections of the workers.

    Args:
        hosts: The place of this host.
        devices_per_worker: CPU devices of each worker, which must be the same on all hosts.

    Attributes:
        address: Address of this host for the workers of other hosts.
        wants_tasks: True if `Tasks` should be sent from time to time.

    Raises:
        LaunchError: if the master cannot be reached, or refuses this host.
    """

    def __init__(self, hosts: HostOptions, devices_per_worker: int | None) -> None:
        self._hosts = hosts
        self._channel = _connected(hosts)
        try:
            self._channel.keep_alive(SILENT_SECONDS)
            self.address = hosts.address or self._channel.own_address()
            self.wants_tasks = self._shake_hands(devices_per_worker)
        except OSError as error:
            self._channel.close()
            raise LaunchError(
                f"launch: {error}. Check that the launcher of host 0 listens there, and not"
                " another program."
            ) from error
        except BaseException:
            self._channel.close()
            raise

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when something arrives; -1 when closed.

        Commands that arrived with the handshake are already read: call `receive` before you wait.
        """
        return self._channel.fileno()

    def send(self, report: Report) -> None:
        """Sends a report; it is lost if the master has gone, in which case `receive` raises.

        `Interrupted` is the last report.
        """
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(*encode(report))
        if isinstance(report, Interrupted):
            self._channel.shut()

    def receive(self) -> Iterator[Command]:
        """Yields the commands that have arrived. After `Exit`, no more reports follow.

        Raises:
            LaunchError: after the last of them, if the master has gone.
        """
        if self._channel.fileno() < 0:
            return
        try:
            for message in self._channel.arrived():
                command = decode(message)
                if isinstance(command, Exit):
                    self._channel.shut()
                yield command
        except ChannelClosedError as error:
            raise LaunchError(
                f"lost the connection to the launcher of host 0 at {self._hosts.master}"
            ) from error

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def _shake_hands(self, devices_per_worker: int | None) -> bool:
        """Joins the job; returns whether the master wants `Tasks`."""
        hosts = self._hosts
        challenge = self._answer("challenge")
        own_challenge = new_challenge()
        hello = {
            "protocol": PROTOCOL,
            "host_rank": hosts.host_rank,
            "num_hosts": hosts.num_hosts,
            "devices_per_worker": devices_per_worker,
        }
        shown = proof(hosts.token, "host", challenge, own_challenge, hello)
        self._channel.send("hello", [hello, own_challenge, shown])
        answer = self._answer("welcome")
        try:
            welcome, shown = answer
            wants_tasks = bool(welcome["wants_tasks"])
        except (KeyError, TypeError, ValueError):
            raise self._unexpected(answer) from None
        if not is_proof(shown, hosts.token, "master", own_challenge, challenge, welcome):
            raise LaunchError(
                f"launch: the program that listens at {hosts.master} does not know the token of"
                " this job. Does another job use this address?"
            )
        return wants_tasks

    def _answer(self, kind: str) -> Any:
        message = self._channel.receive(_ANSWER_SECONDS)
        if message.kind == "refused":
            raise LaunchError(
                f"launch: the master at {self._hosts.master} refuses host"
                f" {self._hosts.host_rank}: {message.content}"
            )
        if message.kind != kind:
            raise self._unexpected(message.kind)
        return message.content

    def _unexpected(self, found: object) -> ChannelClosedError:
        return ChannelClosedError(
            f"{self._channel.peer} sent an unexpected message, {found!r:.100}"
        )


Link: TypeAlias = LocalLink | RemoteLink


def _connected(hosts: HostOptions) -> Channel:
    end = time.monotonic() + hosts.join_seconds
    address = split_address(hosts.master)
    while True:
        try:
            connection = socket.create_connection(address, timeout=_TRY_SECONDS)
            return Channel(connection, f"the program at {hosts.master}", _MAX_LINE_BYTES)
        except OSError as error:
            if time.monotonic() >= end:
                raise LaunchError(
                    f"launch: host {hosts.host_rank} could not reach the master at {hosts.master}"
                    f" within {hosts.join_seconds:g} s: {error}. Does host 0 run the same command"
                    " with --node-rank 0?"
                ) from error
        time.sleep(_PAUSE_SECONDS)
