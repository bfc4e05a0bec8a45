"""Links over gRPC. Each link uses one stream, which lasts as long as its connection."""

import contextlib
import errno
import ipaddress
import logging
import os
import queue
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from ipaddress import IPv4Address, IPv6Address
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

from distributary.cluster_resolver import TOKEN_VARIABLE, join_address
from distributary.errors import ClusterError, MissingPackageError, pip_install
from distributary.job import bound_address
from distributary.servers._certificates import Credentials, name_of_role, role_of_names
from distributary.servers._links import (
    Connection,
    ConnectionLostError,
    Link,
    Peer,
    RefusedError,
    Service,
    UnauthenticatedError,
    answer,
    error_reply,
)
from distributary.servers._messages import (
    MAX_CHUNK_BYTES,
    Assembly,
    Buffer,
    Limits,
    Message,
    WireError,
    decode,
    encode,
    split,
)
from distributary.servers._token import Challenges, Token

if TYPE_CHECKING:
    import grpc

__all__ = ["GrpcLink", "GrpcServer"]

_log = logging.getLogger(__name__)

_SERVICE, _GREET, _TALK = "distributary.Link", "Greet", "Talk"
_REFUSED = os.strerror(errno.ECONNREFUSED)  # gRPC has one code for all failures to connect
_REASON_SECONDS = 1.0  # the reason of a refusal comes a little after the refusal
_PING_OPTIONS = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    # Without this, a frozen peer is noticed only after a minute, whatever the keepalive says.
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_CLIENT_OPTIONS = (
    *_PING_OPTIONS,
    ("grpc.max_receive_message_length", MAX_CHUNK_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # the caller decides what to repeat
    # Every connection is new: it resolves the name again, and does not wait for another's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.min_reconnect_backoff_ms", 2000),  # also the time for one attempt
)
_SERVER_OPTIONS = (
    *_PING_OPTIONS,
    ("grpc.max_receive_message_length", MAX_CHUNK_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port that is in use is an error
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 30_000),  # links are never idle
)


@final
class GrpcLink(Link):
    """A `Link` to a task at an address.

    Args:
        address: `"host:port"` of the task.
        task: Name of the task, such as `"ps 0"`. With certificates, the task's certificate must be
            for this role. With a token, the task must know the token and have this name.
        credentials: Credentials of this task; None to connect to any program that listens there.
        limits: Limits of messages in both directions.

    Raises:
        MissingPackageError: if grpcio is not installed.
    """

    def __init__(
        self,
        address: str,
        task: str,
        credentials: Credentials | Token | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(f"{task} at {address}")
        self._grpc = _import_grpc()
        self._address = address
        self._task = task
        self._role = task.partition(" ")[0]
        self._credentials = credentials if isinstance(credentials, Credentials) else None
        self._token = credentials if isinstance(credentials, Token) else None
        self._limits = limits or Limits()

    def _encode(self, message: Message) -> list[Buffer]:
        return encode(message, self._limits)

    def _converse(self, connection: Connection) -> Exception:
        is_proven: queue.SimpleQueue[bool] = queue.SimpleQueue()  # of the other end
        call: Any = None  # the call under way

        def chunks() -> Iterator[bytes]:
            """Yields what to send, in a thread of gRPC."""
            if is_proven.get():
                for number, buffers in connection.requests():
                    yield from split(number, buffers)

        address, proven_address = self._address, ""
        if self._token is not None:
            try:
                _, ip_address, port = _resolve(address)
            except (OSError, ValueError) as error:
                return ConnectionLostError(f"No connection to {self._name}: {error}.")
            if ip_address.is_loopback:
                # gRPC would try all addresses of the name; another user may listen at one.
                address = proven_address = join_address(str(ip_address), port)
        with self._channel(address) as channel:
            try:
                asked: dict[str, str] = {}
                if self._token is not None:
                    call = channel.unary_unary(f"/{_SERVICE}/{_GREET}").future(b"")
                    connection.cancel_at_end(call.cancel)
                    challenge = call.result().decode("latin-1")
                    asked = self._token.ask(self._task, proven_address, challenge)
                talk = channel.stream_stream(f"/{_SERVICE}/{_TALK}")
                call = talk(chunks(), metadata=[*asked.items()])
                connection.cancel_at_end(call.cancel)
                if self._is_stranger(call, asked):
                    call.cancel()
                    return UnauthenticatedError(
                        f"The program that listens at {self._address} does not prove that it is"
                        f" {self._task} of this job. Start all tasks with the same"
                        f" {TOKEN_VARIABLE}, or end the other program that listens there."
                    )
                is_proven.put(True)
                for number, reply in _messages(call, self._limits):
                    connection.reply(number, reply)
                reason = "it has ended the connection"
            except WireError as error:
                return error
            except (self._grpc.RpcError, self._grpc.FutureCancelledError):
                code, details = call.code(), call.details()
                if code == self._grpc.StatusCode.INVALID_ARGUMENT:
                    return WireError(f"{self._name} refuses a message: {details}")
                if code == self._grpc.StatusCode.UNAUTHENTICATED:
                    return UnauthenticatedError(f"{self._name} refuses this task: {details}")
                reason = f"{code.name}: {details}"
            finally:
                is_proven.put(False)
        if self._credentials and not connection.has_heard:
            reason += (
                f". Its certificate must be that of role {self._role!r}, and of the same authority"
                " as that of this task"
            )
        kind = RefusedError if _REFUSED in reason else ConnectionLostError
        return kind(f"No connection to {self._name}: {reason}.")

    def _is_stranger(self, call: "grpc.Call", asked: Mapping[str, str]) -> bool:
        """Returns whether the other end goes on without proving that it knows the token."""
        if self._token is None:
            return False
        if self._token.knows_task(self._task, asked, dict(call.initial_metadata() or ())):
            return False
        with contextlib.suppress(self._grpc.FutureTimeoutError, self._grpc.FutureCancelledError):
            call.exception(_REASON_SECONDS)
        return bool(call.is_active())

    def _channel(self, address: str) -> Any:
        if self._credentials is None:
            return self._grpc.insecure_channel(address, _CLIENT_OPTIONS)
        own = self._credentials
        credentials = self._grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
        # The name in a certificate is the role, not the host.
        name = ("grpc.ssl_target_name_override", name_of_role(self._role))
        return self._grpc.secure_channel(address, credentials, (*_CLIENT_OPTIONS, name))


def _messages(chunks: Iterable[bytes], limits: Limits) -> Iterator[tuple[int, Message]]:
    """Yields the messages in chunks, with their numbers; raises `WireError`."""
    assembly = Assembly(limits)
    for chunk in chunks:
        if (complete := assembly.add(chunk)) is not None:
            number, buffer = complete
            yield number, decode(buffer, limits)


@final
class GrpcServer:
    """A server through which other tasks call a service, with one thread per link.

    A link takes the memory of one request and one reply at a time.

    Args:
        service: The service that is called.
        address: `"host:port"`, the only address to listen at. Port 0 takes a free port.
        credentials: Credentials of this task. With certificates, only peers with a certificate of
            the same CA can connect. With a token, which is enough on a loopback address, only
            peers that know the same token can.
        limits: Limits of messages in both directions.
        task: Name of this task, such as `"ps 0"`. With a token, callers must expect this task.
        max_links: Maximum number of links; any further ones are refused.
        insecure: Allows addresses other than loopback without certificates, and all addresses
            without credentials. Anyone who reaches the address can then read and write everything.

    Raises:
        ClusterError: if it cannot listen at the address, or must not with these credentials.
        MissingPackageError: if grpcio is not installed.

    Attributes:
        address: The address, with the port that was taken.
    """

    def __init__(
        self,
        service: Service,
        address: str,
        credentials: Credentials | Token | None = None,
        limits: Limits | None = None,
        *,
        task: str = "",
        max_links: int = 256,
        insecure: bool = False,
    ) -> None:
        self._grpc = _import_grpc()
        self._service = service
        self._limits = limits or Limits()
        self._task = task
        self._has_certificates = isinstance(credentials, Credentials)
        self._token = credentials if isinstance(credentials, Token) else None
        self._challenges = Challenges()
        self._has_warned = False
        try:
            host, ip_address, port = _resolve(address)
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"Cannot listen at {address}: {error}. Give the address under which the other tasks"
                ' reach this one, such as "10.0.0.1:2222".'
            ) from error
        if not (self._has_certificates or insecure or ip_address.is_loopback):
            raise ClusterError(
                f"Listening at {address} without certificates would let anyone who reaches the"
                " address read and write the variables. `distributary certs` makes certificates,"
                " DISTRIBUTARY_CERTS says where they are; insecure=True does without."
            )
        if not (credentials or insecure):
            raise ClusterError(
                f"Listening at {address} without a secret would let every user of this machine"
                " read and write the variables. `distributary launch` gives all tasks one; those"
                f" that you start yourself need the same {TOKEN_VARIABLE}, such as"
                " `openssl rand -hex 16` makes; insecure=True does without."
            )
        self._threads = _Threads()
        self._server = self._grpc.server(self._threads, options=_SERVER_OPTIONS)
        self._places = threading.BoundedSemaphore(max_links)
        methods = {
            # A stream, so that the answer does not wait for a request that a stranger never sends.
            _GREET: self._grpc.stream_unary_rpc_method_handler(self._greet),
            _TALK: self._grpc.stream_stream_rpc_method_handler(self._talk),
        }
        self._server.add_generic_rpc_handlers(
            (self._grpc.method_handlers_generic_handler(_SERVICE, methods),)
        )
        try:
            port = self._listen(join_address(str(ip_address), port), credentials)
        except RuntimeError as error:
            raise ClusterError(
                f"Cannot listen at {address}: {error}. Is the port in use, or the address that of"
                " another machine?"
            ) from error
        self.address = join_address(host, port)
        self._only_address = join_address(str(ip_address), port) if ip_address.is_loopback else None
        self._server.start()

    def close(self, seconds: float | None = None) -> None:
        """Ends all connections, and waits for requests that are being handled.

        Args:
            seconds: Longest time to wait for these requests; None to wait until they are done.
        """
        self._server.stop(None).wait(seconds)
        self._threads.join(seconds)

    def _listen(self, address: str, credentials: Credentials | Token | None) -> int:
        if not isinstance(credentials, Credentials):
            return self._server.add_insecure_port(address)
        pair = (credentials.key, credentials.certificate)
        return self._server.add_secure_port(
            address,
            self._grpc.ssl_server_credentials([pair], credentials.ca, require_client_auth=True),
        )

    def _greet(self, requests: Iterator[bytes], context: "grpc.ServicerContext") -> bytes:
        """Returns a challenge to any caller, whatever it sends."""
        return self._challenges.new().encode()

    def _talk(self, chunks: Iterator[bytes], context: "grpc.ServicerContext") -> Iterator[bytes]:
        """Serves one link, in a thread of its own."""
        peer = self._peer(context)  # checked before anything from the caller is read
        if not self._places.acquire(blocking=False):  # only tasks of the job take places
            context.abort(self._grpc.StatusCode.RESOURCE_EXHAUSTED, "All links are in use.")
        try:
            for number, request in _messages(chunks, self._limits):
                yield from split(number, self._reply(request, peer))
        except WireError as error:
            context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._places.release()

    def _reply(self, request: Message, peer: Peer) -> list[Buffer]:
        try:
            return encode(answer(self._service, request, peer), self._limits)
        except WireError as error:
            return encode(error_reply(error), self._limits)

    def _peer(self, context: "grpc.ServicerContext") -> Peer:
        if not self._has_certificates:
            self._check_token(context)
            return Peer("local", context.peer())
        names = context.auth_context().get("x509_subject_alternative_name", [])
        role = role_of_names([name.decode() for name in names])
        if role is not None:
            return Peer(role, f"{role} at {context.peer()}")
        return context.abort(  # which raises
            self._grpc.StatusCode.UNAUTHENTICATED,
            f"The certificate with the names {names} has no role.",
        )

    def _check_token(self, context: "grpc.ServicerContext") -> None:
        if self._token is None:  # insecure; the caller may wait for a proof
            context.send_initial_metadata(())
            return
        asked = dict(context.invocation_metadata())
        reason = self._token.refusal(self._task, self._only_address, asked, self._challenges)
        if reason is None:
            answer = self._token.answer(self._task, asked)
            context.send_initial_metadata([*answer.items()])
            return
        # Warns only once, as a stranger may keep trying.
        _log.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "%s refuses %s: %s",
            self._task,
            context.peer(),
            reason,
        )
        self._has_warned = True
        context.abort(self._grpc.StatusCode.UNAUTHENTICATED, reason)


@final
class _Threads(Executor):
    """An executor with a daemon thread per link, so that a process ends without its peers."""

    def __init__(self) -> None:
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name="distributary server", daemon=True)
        self._threads.add(thread)
        thread.start()
        return future

    def join(self, seconds: float | None) -> None:
        """Waits until all threads have ended, or for at most `seconds` in total."""
        end = None if seconds is None else time.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(None if end is None else max(0.0, end - time.monotonic()))


def _resolve(address: str) -> tuple[str, IPv4Address | IPv6Address, int]:
    """Returns host, IP address and port; the task listens at this IP address, which was checked.

    Raises:
        OSError: if the host is unknown.
        ValueError: if it is not an address.
    """
    parts = urllib.parse.urlsplit(f"//{address}")
    host, port = parts.hostname, parts.port
    if host is None or port is None or parts.netloc != address:
        raise ValueError("it is not host:port")
    _, found = bound_address(host, port)
    return host, ipaddress.ip_address(found[0]), port


def _import_grpc() -> ModuleType:
    try:
        import grpc
    except ImportError:
        raise MissingPackageError(
            f"Parameter servers in several processes need grpcio: {pip_install('ps')}"
        ) from None
    return grpc
