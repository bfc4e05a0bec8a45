"""Where the launchers of several hosts meet: a server on host 0, with the `Job` of all hosts."""

import asyncio
import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, final

from distributary.errors import LaunchError
from distributary.launch._handshake import dump, has_proof, keep_alive, new_challenge, with_proof
from distributary.launch._job import Command, Job, Tasks, decode, encode
from distributary.launch._options import HostOptions, LaunchOptions, split_address
from distributary.launch._remote_link import PROTOCOL

__all__ = ["Master"]

_HANDSHAKE_SECONDS = 10.0
_MAX_LINE_BYTES = 2**20
_MAX_STRANGERS = 64  # connections whose handshake is not over; more if there are more hosts
_WAITING_SECONDS = 5.0  # before it says for whom it waits
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 5.0  # for hosts to take note of the end


@final
class _RefusedError(Exception):
    """A connection that does not belong to the job; its text goes to the other side."""


@final
class Master:
    """A thread that lets the hosts join and tells them what to do.

    Args:
        options: The job, with the hosts.
        say: Shows a line to the user; for any thread.

    Raises:
        LaunchError: if the address cannot be listened on.
    """

    def __init__(self, options: LaunchOptions, say: Callable[[str], None]) -> None:
        assert options.hosts is not None
        self._hosts = options.hosts
        self._devices_per_worker = options.devices_per_worker
        self._say = say
        self._job = Job(self._hosts.num_hosts, options.max_restarts)
        # Touched by the thread only, like the job.
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._peers: dict[int, str] = {}
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest one first
        self._tasks: dict[int, Tasks] = {}  # of the other hosts; read by any thread
        self._wants_tasks = options.dashboard_port is not None
        self._socket = _listen(self._hosts)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="launch-master", daemon=True
        )
        self._thread.start()

    def tasks(self) -> dict[int, Tasks]:
        """The tasks of the other hosts, as they were a second ago, if there is a dashboard."""
        return dict(self._tasks)

    def close(self) -> None:
        """Waits until all hosts have taken note of the end of the job, for a few seconds.

        Without such an end they take note of it when this process has ended.
        """
        if self._job.is_over:
            self._thread.join(_CLOSE_SECONDS)

    async def _serve(self) -> None:
        handlers: set[asyncio.Task[None]] = set()
        max_strangers = max(_MAX_STRANGERS, self._hosts.num_hosts)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            handlers.add(task)
            self._strangers[task] = None
            if len(self._strangers) > max_strangers:  # hosts speak at once: the oldest is none
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            try:
                await self._talk(reader, writer, task)
            except asyncio.CancelledError:
                pass
            finally:
                self._strangers.pop(task, None)
                handlers.discard(task)
                writer.close()

        server = await asyncio.start_server(handle, sock=self._socket, limit=_MAX_LINE_BYTES)
        try:
            await self._watch()
            while self._writers:  # until they have taken note of the end
                await asyncio.sleep(_POLL_SECONDS / 10)
        finally:
            server.close()
            for task in handlers:
                task.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)

    async def _watch(self) -> None:
        """Ends the job if hosts are missing for too long; returns when it is over."""
        complete_at = time.monotonic()
        has_said = False
        while not self._job.is_over:
            await asyncio.sleep(_POLL_SECONDS)
            if not self._job.missing:
                complete_at = time.monotonic()
                has_said = False
                continue
            seconds = time.monotonic() - complete_at
            missing = _enumerate(self._job.missing)
            if seconds > self._hosts.join_seconds:
                here = [f"host {rank} ({peer})" for rank, peer in sorted(self._peers.items())]
                self._send(
                    self._job.fail(
                        f"{missing} of {self._hosts.num_hosts} did not join at"
                        f" {self._hosts.master} within {self._hosts.join_seconds:g} s; joined:"
                        f" {', '.join(here) or 'none'}"
                    )
                )
            elif seconds > _WAITING_SECONDS and not has_said:
                has_said = True
                self._say(f"waiting for {missing} to join at {self._hosts.master}.")

    async def _talk(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: "asyncio.Task[None]",
    ) -> None:
        peer = writer.get_extra_info("peername")[0]
        keep_alive(writer.get_extra_info("socket"))
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                host = await self._shake_hands(reader, writer)
        except _RefusedError as error:
            self._say(f"refused a connection from {peer}: {error}")
            with contextlib.suppress(OSError):
                writer.write(dump({"refused": str(error)}))
                await writer.drain()
            return
        except (OSError, RecursionError, ValueError):  # a port scanner, or nobody
            return
        self._strangers.pop(task, None)
        self._writers[host] = writer
        self._peers[host] = peer
        self._send(self._job.join(host))
        try:
            while line := await reader.readline():
                report = decode(line)
                if isinstance(report, Tasks):
                    self._tasks[host] = report
                else:
                    self._send(self._job.report(host, report))
        except (OSError, ValueError) as error:
            self._say(f"host {host}: {error}")
        finally:
            del self._writers[host]
            del self._peers[host]
            self._tasks.pop(host, None)
            self._send(self._job.lose(host, f"the launcher of host {host} ({peer}) has gone"))

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Returns the rank of a host that may join; the welcome is sent."""
        challenge = new_challenge()
        writer.write(dump({"challenge": challenge}))
        hello: Any = json.loads(await reader.readline())
        token = self._hosts.token
        if not isinstance(hello, dict) or not has_proof(
            hello, token, challenge, str(hello.get("challenge")), "host"
        ):
            raise _RefusedError("its token is not that of this job")
        if hello["protocol"] != PROTOCOL:
            raise _RefusedError("another version of distributary runs there")
        host = self._checked_rank(hello)
        own_challenge = str(hello["challenge"])
        welcome = {"welcome": host, "wants_tasks": self._wants_tasks and host != 0}
        writer.write(dump(with_proof(welcome, token, own_challenge, challenge, "master")))
        return host

    def _checked_rank(self, hello: dict[str, Any]) -> int:
        host = hello["host_rank"]
        if hello["num_hosts"] != self._hosts.num_hosts:
            raise _RefusedError(
                f"host {host} has --nnodes {hello['num_hosts']}, host 0 has {self._hosts.num_hosts}"
            )
        if hello["devices_per_worker"] != self._devices_per_worker:
            raise _RefusedError(
                f"host {host} has --devices-per-worker {hello['devices_per_worker']}, host 0 has"
                f" {self._devices_per_worker}"
            )
        if host in self._writers:
            raise _RefusedError(f"--node-rank {host} is taken by {self._peers[host]}")
        if self._job.is_over:
            raise _RefusedError("the job is over")
        return int(host)

    def _send(self, commands: list[tuple[int, Command]]) -> None:
        for host, command in commands:
            if host in self._writers:
                self._writers[host].write(encode(command))


def _listen(hosts: HostOptions) -> socket.socket:
    """A socket on the master's address, and on no other one."""
    name, port = split_address(hosts.master)
    end = time.monotonic() + hosts.join_seconds
    while True:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                name, port, type=socket.SOCK_STREAM
            )[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen()
            except BaseException:
                listener.close()
                raise
            return listener
        except OSError as error:
            # The name of a Kubernetes pod is published some time after the pod has started.
            is_early = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            if not is_early or time.monotonic() >= end:
                raise LaunchError(
                    f"launch: host 0 cannot listen on the master address {hosts.master}:"
                    f" {error.strerror}. Give an address of host 0 and a free port."
                ) from error
        time.sleep(_POLL_SECONDS)


def _enumerate(hosts: list[int]) -> str:
    return ("host " if len(hosts) == 1 else "hosts ") + ", ".join(map(str, hosts))
