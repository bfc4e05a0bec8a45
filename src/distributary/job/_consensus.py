"""Agreements between all workers of a job, on the host."""

import atexit
import contextlib
import json
import secrets
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from distributary.cluster_resolver import MultiWorker
from distributary.dispatch import job_programs
from distributary.errors import ClusterError, WorkerMismatchError
from distributary.job._channel import Channel, ChannelClosedError, Message
from distributary.job._meeting import bind_address
from distributary.job._reception import Reception
from distributary.topology import coordination_client
from distributary.tracing import script_line

__all__ = ["Consensus", "connected_channels", "consensus", "start_consensus"]

_CONNECT_SECONDS = 60.0
_KEY = "distributary/channels"
_STEPS = "steps"  # topic of the thread that runs the script


@final
class Consensus:
    """An exchange of messages between all workers of a job.

    Every worker calls the same methods in the same order, with the same `place`. Each call tells
    where the worker is in its program, so workers that come to different places get an error that
    names both. An exchange takes 0.1 to 0.2 ms. JAX's key-value store takes about a millisecond,
    and a collective would wait for the programs before it.

    A thread that agrees on something beside the script, such as one that writes a checkpoint, uses
    a `topic` of its own, the same on every worker.

    Args:
        names: Names of the workers.
        number: Number of this worker.
        channels: On worker 0, a channel to each other worker, by number; on the others, one to 0.

    Attributes:
        names: Names of the workers.
        number: Number of this worker.
        waiting_at: The place at which the thread of the script waits for the others, or None.
        latest_mismatch: The error that all workers have raised, until they agree again, or None.
        after_mismatch: Called on all workers before they raise such an error.
    """

    def __init__(self, names: Sequence[str], number: int, channels: Mapping[int, Channel]) -> None:
        self.names = tuple(names)
        self.number = number
        self.waiting_at: str | None = None
        self.latest_mismatch: WorkerMismatchError | None = None
        self.after_mismatch: Callable[[], None] = lambda: None
        self._mailboxes = {other: _Mailbox(channel) for other, channel in sorted(channels.items())}
        self._sending = threading.Lock()
        self._counters: dict[str, int] = defaultdict(int)
        # Runs before JAX waits for the other workers at the end, which may wait here for this one.
        atexit.register(weakref.finalize(self, _close, list(channels.values())))

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.names)

    def count(self, what: str) -> int:
        """Returns the number of earlier calls with `what`; the same number on every worker."""
        number = self._counters[what]
        self._counters[what] += 1
        return number

    def exchange(
        self, place: str, message: bytes, topic: str = _STEPS, seconds: float | None = None
    ) -> list[bytes]:
        """Returns the messages of all workers, in worker order.

        Args:
            place: Place of this worker in its program.
            message: The message of this worker.
            topic: The conversation, if it is not that of the script.
            seconds: Time to wait for each of the others; None for as long as they live.

        Raises:
            TimeoutError: if another worker does not come in time.
            WorkerMismatchError: on every worker, if they are at different places.
            ClusterError: if a worker is gone.
            WorkerLostError: if `Liveness` has noticed that a worker is gone.
        """
        own = Message(topic, [place, script_line()], message)
        if topic == _STEPS:
            self.latest_mismatch = None
            self.waiting_at = place
            job_programs.num_meetings += 1  # before the position: `Liveness` relies on the order
            job_programs.position += 1
        try:
            said = self._collect(own, seconds) if self.number == 0 else self._ask(own, seconds)
        except ChannelClosedError as gone:
            self.shut()  # tells the others, too
            error = ClusterError(
                f"{gone}, and what that worker has to say at {place} was needed here. Look at its"
                " output. If it ended without an error: all workers must take the same steps over"
                " the same datasets."
            )
            raise job_programs.explained(error) from None
        finally:
            if topic == _STEPS:
                self.waiting_at = None
        if any(one.content[0] != place for one in said):
            raise self._at_different_places([one.content for one in said])
        return [one.blob for one in said]

    def agree(
        self,
        place: str,
        say: Callable[[], Any],
        topic: str = _STEPS,
        seconds: float | None = None,
    ) -> list[Any]:
        """Returns the results of `say()` on every worker, in worker order.

        Args:
            place: Place of this worker in its program.
            say: Returns something JSON can hold.
            topic: The conversation, if it is not that of the script.
            seconds: Time to wait for each of the others; None for as long as they live.

        Raises:
            TimeoutError: if another worker does not come in time.
            Exception: if `say` raises it, after the others were told.
            ClusterError: if `say` raises on another worker.
            WorkerMismatchError: if another worker is at another place.
        """
        texts = self.agree_on_text(place, lambda: json.dumps(say()), topic, seconds)
        return [json.loads(text) for text in texts]

    def agree_on_text(
        self,
        place: str,
        say: Callable[[], str],
        topic: str = _STEPS,
        seconds: float | None = None,
    ) -> list[str]:
        """Does the same as `agree`, for texts."""
        failure = None
        try:
            own = f"={say()}".encode()
        except BaseException as error:
            failure = error
            own = f"!{type(error).__name__}: {error}".encode()
        said = self.exchange(place, own, topic, seconds)
        if failure is not None:
            raise failure
        if said.count(own) == len(said):
            return [own[1:].decode()] * len(said)
        texts = [message.decode() for message in said]
        for name, text in zip(self.names, texts, strict=True):
            if text[0] == "!":
                raise ClusterError(f"{name} failed at {place}: {text[1:]}")
        return [text[1:] for text in texts]

    def broadcast(self, place: str, say: Callable[[], bytes]) -> bytes:
        """Returns the result of `say()` on worker 0, on every worker.

        Raises:
            WorkerMismatchError: if another worker is at another place.
        """
        return self.exchange(place, say() if self.number == 0 else b"")[0]

    def tell(self, topic: str, content: Any) -> None:
        """Sends something to all other workers, which `hear` it; for worker 0."""
        message = Message(topic, content)
        with contextlib.suppress(ChannelClosedError), self._sending:
            for mailbox in self._mailboxes.values():
                mailbox.channel.send(*message)

    def hear(self, topic: str, seconds: float | None = None) -> Any:
        """Waits for the next content that worker 0 tells all others on a topic, and returns it.

        Raises:
            TimeoutError: if it tells nothing in time.
            ClusterError: if worker 0 is gone.
        """
        is_script = threading.current_thread() is threading.main_thread()
        if is_script:
            self.waiting_at = topic
        try:
            return self._mailboxes[0].take(topic, seconds).content
        except ChannelClosedError as gone:
            error = ClusterError(f"{gone}, and its answer was needed: {topic}. Look at its output.")
            raise job_programs.explained(error) from None
        finally:
            if is_script:
                self.waiting_at = None

    def shut(self) -> None:
        """Ends the conversations, so that every thread that waits for a message stops."""
        for mailbox in self._mailboxes.values():
            mailbox.channel.shut()

    def _collect(self, own: Message, seconds: float | None) -> list[Message]:
        said = [own, *(box.take(own.kind, seconds) for box in self._mailboxes.values())]
        # Usually all say the same.
        same = said.count(own) == len(said)
        with self._sending:
            for mailbox in self._mailboxes.values():
                if same:
                    mailbox.channel.send(own.kind, None)
                    continue
                for one in said:
                    mailbox.channel.send(*one)
        return said

    def _ask(self, own: Message, seconds: float | None) -> list[Message]:
        (mailbox,) = self._mailboxes.values()
        with self._sending:
            mailbox.channel.send(*own)
        first = mailbox.take(own.kind, seconds)
        if first.content is None:  # the same
            return [own] * len(self.names)
        return [first, *(mailbox.take(own.kind, seconds) for _ in self.names[1:])]

    def _at_different_places(self, places: Sequence[tuple[str, str]]) -> WorkerMismatchError:
        seen = "; ".join(
            f"{name} at {line} with {place}"
            for name, (place, line) in zip(self.names, places, strict=True)
        )
        return self.mismatch(
            f"The workers are at different places of their programs: {seen}. All workers must do"
            " the same things with the strategy, in the same order."
        )

    def mismatch(self, text: str) -> WorkerMismatchError:
        """Returns an error that all workers raise now."""
        self.latest_mismatch = WorkerMismatchError(text)
        self.after_mismatch()
        return self.latest_mismatch


@final
class _Mailbox:
    """The messages of one channel, by topic.

    Of the threads that wait for messages, one reads for all.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._changed = threading.Condition()
        self._kept: dict[str, deque[Message]] = {}
        self._is_reading = False

    def take(self, topic: str, seconds: float | None) -> Message:
        """Waits for the next message on a topic.

        Raises:
            TimeoutError: if it does not come in time.
            ChannelClosedError: if the other process is gone.
        """
        deadline = None if seconds is None else time.monotonic() + seconds

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        with self._changed:
            while True:
                kept = self._kept.get(topic)
                if kept:
                    message = kept.popleft()
                    if not kept:
                        del self._kept[topic]
                    return message
                if not self._is_reading:
                    break
                if not self._changed.wait(left()):
                    raise TimeoutError(f"{self.channel.peer} has said nothing")
            self._is_reading = True
        try:
            while (message := self.channel.receive(left())).kind != topic:
                with self._changed:
                    self._kept.setdefault(message.kind, deque()).append(message)
                    self._changed.notify_all()
            return message
        finally:
            with self._changed:
                self._is_reading = False
                self._changed.notify_all()


def _close(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.close()


_consensus: Consensus | None = None


def consensus() -> Consensus | None:
    """Returns the consensus of this process's job; None if the process is alone."""
    return _consensus


def start_consensus(place: MultiWorker) -> Consensus:
    """Connects the workers for their agreements, after JAX has connected them.

    Raises:
        ClusterError: if the workers cannot reach each other.
    """
    global _consensus
    assert place.worker_number is not None
    names = [peer.name for peer in place.workers]
    _consensus = Consensus(names, place.worker_number, connected_channels(place, "consensus"))
    return _consensus


def connected_channels(place: MultiWorker, purpose: str) -> dict[int, Channel]:
    """Returns channels by number: from worker 0 to each other worker, from the others to worker 0.

    All workers call it once for each purpose, after JAX has connected them.

    Raises:
        ClusterError: if the workers cannot reach each other.
    """
    key = f"{_KEY}/{purpose}"
    return _accepted(place, key) if place.worker_number == 0 else {0: _connected(place, key)}


def _accepted(place: MultiWorker, key: str) -> dict[int, Channel]:
    """Listens at a free port of worker 0 and tells the others its number through JAX's service."""
    peers = tuple(map(str, place.workers))
    token = secrets.token_hex(16)
    host, _, _ = bind_address(place.workers[0]).rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    client = coordination_client()
    try:
        server = socket.create_server((host.strip("[]"), 0), family=family)
    except OSError as error:
        client.key_value_set(key, json.dumps([0, token]))
        raise _cannot_listen(peers[0]) from error
    with server:
        client.key_value_set(key, json.dumps([server.getsockname()[1], token]))
        arrived: dict[int, Channel] = {}
        deadline = time.monotonic() + _CONNECT_SECONDS
        with Reception(server, len(peers)) as reception:
            for channel, message in reception.arrivals(deadline):
                number = _number_of(message, token)
                if number is None or number in arrived or not 0 < number < len(peers):
                    channel.close()  # from a program outside of the job
                    continue
                channel.peer = peers[number]
                arrived[number] = channel
                if len(arrived) == len(peers) - 1:
                    return arrived
        missing = [p for number, p in enumerate(peers) if number and number not in arrived]
        raise ClusterError(
            f"{', '.join(missing)} did not connect to {peers[0]} within {_CONNECT_SECONDS:g} s."
            " Workers must reach every port of the first one."
        )


def _number_of(message: Message, token: str) -> int | None:
    """Returns the number of the worker that has connected; None if it is not of the job."""
    content = message.content
    if message.kind != "join" or not isinstance(content, list) or len(content) != 2:
        return None
    said, number = content
    is_known = isinstance(said, str) and secrets.compare_digest(said.encode(), token.encode())
    return number if is_known and type(number) is int else None


def _connected(place: MultiWorker, key: str) -> Channel:
    first = place.workers[0]
    milliseconds = int(_CONNECT_SECONDS * 1000)
    port, token = json.loads(coordination_client().blocking_key_value_get(key, milliseconds))
    if not port:
        raise _cannot_listen(str(first))
    try:
        connection = socket.create_connection((first.host, port), _CONNECT_SECONDS)
        channel = Channel(connection, str(first))
        channel.send("join", [token, place.worker_number])
        return channel
    except OSError as error:
        raise ClusterError(
            f"{place.name} cannot connect to {first}, port {port}: {error}. Workers must reach"
            " every port of the first one."
        ) from error


def _cannot_listen(first: str) -> ClusterError:
    return ClusterError(
        f"{first} cannot listen for the other workers: the address of a worker must be one of its"
        " own machine."
    )
