"""The connection from the launcher of a host to host 0, which decides."""

import contextlib
import socket
import time
from typing import Any, final

from distributary.errors import LaunchError
from distributary.job import Channel, ChannelClosedError, is_proof, new_challenge, proof
from distributary.launch._job import Command, Report, decode, encode
from distributary.launch._options import HostOptions, split_address

__all__ = ["PROTOCOL", "SILENT_SECONDS", "RemoteLink"]

PROTOCOL = 3
SILENT_SECONDS = 20  # after which the other machine is taken to be gone
_TRY_SECONDS = 2.0  # for one attempt to connect
_ANSWER_SECONDS = 10.0
_MAX_LINE_BYTES = 2**16
_PAUSE_SECONDS = 0.1


@final
class RemoteLink:
    """A connection to the master, which must be made before a deadline.

    The launchers first prove to each other that they know the token of the job:

        host 0                          other host
          challenge (random) ------------->
          <------------- hello, with another challenge
          welcome, or refused ------------>

    What follows is neither encrypted nor signed, like the connections of the workers.

    Args:
        hosts: The place of this host.
        devices_per_worker: CPU devices of each worker, which must be the same on all hosts.

    Raises:
        LaunchError: if the master cannot be reached, or refuses this host.
    """

    def __init__(self, hosts: HostOptions, devices_per_worker: int | None) -> None:
        self._master = hosts.master
        self._channel = _connected(hosts)
        with contextlib.ExitStack() as stack:
            stack.callback(self._channel.close)
            try:
                self._channel.keep_alive(SILENT_SECONDS)
                self.address = hosts.address or self._channel.own_address()
                self._shake_hands(hosts, devices_per_worker)
            except OSError as error:
                raise LaunchError(
                    f"launch: {error}. Check that the launcher of host 0 listens there, and not"
                    " another program."
                ) from error
            stack.pop_all()

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when something arrives; -1 when closed.

        Commands that arrived with the handshake are already read: call `receive` before you wait.
        """
        return self._channel.fileno()

    def send(self, report: Report) -> None:
        """Sends a report; it is lost if the master has gone, in which case `receive` raises."""
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(*encode(report))

    def receive(self) -> list[Command]:
        """Returns the commands that have arrived.

        Raises:
            LaunchError: if the master has gone.
        """
        if self._channel.fileno() < 0:
            return []
        commands: list[Command] = []
        try:
            for message in self._channel.arrived():
                commands.append(decode(message))
        except ChannelClosedError as error:
            if not commands:  # otherwise the next call raises
                raise LaunchError(
                    f"lost the connection to the launcher of host 0 at {self._master}"
                ) from error
        return commands

    def end(self) -> None:
        """Tells the master that no more reports follow."""
        self._channel.shut()

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def _shake_hands(self, hosts: HostOptions, devices_per_worker: int | None) -> None:
        challenge = self._answer("challenge", hosts)
        own_challenge = new_challenge()
        hello = {
            "protocol": PROTOCOL,
            "host_rank": hosts.host_rank,
            "num_hosts": hosts.num_hosts,
            "devices_per_worker": devices_per_worker,
        }
        shown = proof(hosts.token, "host", challenge, own_challenge, hello)
        self._channel.send("hello", [hello, own_challenge, shown])
        answer = self._answer("welcome", hosts)
        try:
            welcome, shown = answer
            wants_tasks = bool(welcome["wants_tasks"])
        except (KeyError, TypeError, ValueError):
            raise ChannelClosedError(
                f"{self._channel.peer} sent an unexpected message, {answer!r:.100}"
            ) from None
        if not is_proof(shown, hosts.token, "master", own_challenge, challenge, welcome):
            raise LaunchError(
                f"launch: the program that listens at {hosts.master} does not know the token of"
                " this job. Does another job use this address?"
            )
        self.wants_tasks = wants_tasks

    def _answer(self, kind: str, hosts: HostOptions) -> Any:
        message = self._channel.receive(_ANSWER_SECONDS)
        if message.kind == "refused":
            raise LaunchError(
                f"launch: the master at {hosts.master} refuses host {hosts.host_rank}:"
                f" {message.content}"
            )
        if message.kind != kind:
            raise ChannelClosedError(
                f"{self._channel.peer} sent an unexpected message, {message.kind!r:.100}"
            )
        return message.content


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
