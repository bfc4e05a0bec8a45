"""The way from the launcher of a host to host 0, which decides."""

import contextlib
import json
import select
import socket
import time
from typing import Any, final

from distributary.errors import LaunchError
from distributary.launch._handshake import dump, has_proof, keep_alive, new_challenge, with_proof
from distributary.launch._job import Command, Report, decode, encode
from distributary.launch._options import HostOptions, split_address

__all__ = ["PROTOCOL", "RemoteLink"]

PROTOCOL = 2
_TRY_SECONDS = 2.0  # for one attempt to connect
_ANSWER_SECONDS = 10.0
_MAX_ANSWER_BYTES = 2**16
_PAUSE_SECONDS = 0.1


@final
class RemoteLink:
    """A connection to the master, made within a deadline.

    Args:
        hosts: The place of this host.
        devices_per_worker: CPU devices of each worker, which must be the same everywhere.

    Raises:
        LaunchError: if the master cannot be reached or does not take this host.
    """

    def __init__(self, hosts: HostOptions, devices_per_worker: int | None) -> None:
        self._master = hosts.master
        self._connection = _connect(hosts)
        self._received = b""
        try:
            self._connection.settimeout(_ANSWER_SECONDS)
            keep_alive(self._connection)
            self.address = hosts.address or self._connection.getsockname()[0]
            self._shake_hands(hosts, devices_per_worker)
        except OSError as error:
            self._connection.close()
            raise LaunchError(
                f"launch: the master at {hosts.master} broke off: {error}. Is another program"
                " listening there?"
            ) from error
        except LaunchError:
            self._connection.close()
            raise

    def fileno(self) -> int:
        """The descriptor that becomes readable when something comes; -1 when closed.

        What came with the handshake has been read from it: call `receive` before waiting.
        """
        return self._connection.fileno()

    def send(self, report: Report) -> None:
        """Says something; it is lost if the master has gone, which `receive` will tell."""
        with contextlib.suppress(OSError):
            self._connection.sendall(encode(report))

    def receive(self) -> list[Command]:
        """The commands that have come.

        Raises:
            LaunchError: if the master has gone.
        """
        if self._connection.fileno() < 0:
            return []
        if not self._received.count(b"\n"):
            if not select.select([self._connection], [], [], 0)[0]:
                return []
            self._read_more()
        *lines, self._received = self._received.split(b"\n")
        return [decode(line) for line in lines]

    def end(self) -> None:
        """Says that nothing more will be said."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leaves."""
        self._connection.close()

    def _read_more(self) -> None:
        try:
            data = self._connection.recv(2**16)
        except OSError:
            data = b""
        if not data:
            raise LaunchError(f"the launcher of host 0 at {self._master} has gone")
        self._received += data

    def _shake_hands(self, hosts: HostOptions, devices_per_worker: int | None) -> None:
        challenge = str(self._read_answer().get("challenge"))
        own_challenge = new_challenge()
        hello = {
            "protocol": PROTOCOL,
            "challenge": own_challenge,
            "host_rank": hosts.host_rank,
            "num_hosts": hosts.num_hosts,
            "devices_per_worker": devices_per_worker,
        }
        self._connection.sendall(
            dump(with_proof(hello, hosts.token, challenge, own_challenge, "host"))
        )
        answer = self._read_answer()
        if "refused" in answer:
            raise LaunchError(
                f"launch: the master at {hosts.master} refuses host {hosts.host_rank}:"
                f" {answer['refused']}"
            )
        if not has_proof(answer, hosts.token, own_challenge, challenge, "master"):
            raise LaunchError(
                f"launch: what listens at {hosts.master} does not know the token of this job. Is"
                " another job using the address?"
            )
        self.wants_tasks = bool(answer["wants_tasks"])

    def _read_answer(self) -> dict[str, Any]:
        end = time.monotonic() + _ANSWER_SECONDS
        while b"\n" not in self._received:
            self._connection.settimeout(max(0.001, end - time.monotonic()))
            data = self._connection.recv(4096)
            if len(self._received) > _MAX_ANSWER_BYTES:
                raise ConnectionError("it speaks another language")
            if not data:
                raise ConnectionError("it closed the connection")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            answer = json.loads(line)
            if not isinstance(answer, dict) or not answer.keys() & {
                "challenge",
                "refused",
                "welcome",
            }:
                raise ValueError
        except (RecursionError, ValueError) as error:
            raise ConnectionError("it speaks another language") from error
        return answer


def _connect(hosts: HostOptions) -> socket.socket:
    end = time.monotonic() + hosts.join_seconds
    address = split_address(hosts.master)
    while True:
        try:
            return socket.create_connection(address, timeout=_TRY_SECONDS)
        except OSError as error:
            if time.monotonic() >= end:
                raise LaunchError(
                    f"launch: host {hosts.host_rank} could not reach the master at {hosts.master}"
                    f" within {hosts.join_seconds:g} s: {error}. Does host 0 run the same command"
                    " with --node-rank 0?"
                ) from error
        time.sleep(_PAUSE_SECONDS)
