"""Links over gRPC. Each link uses one stream, which lasts as long as its connection."""

import errno
import ipaddress
import os
import re
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Any, final

from distributary.cluster_resolver import TOKEN_VARIABLE, join_address
from distributary.errors import ClusterError
from distributary.job import bound_address
from distributary.servers._certificates import (
    CERTIFICATES_VARIABLE,
    Credentials,
    import_extra,
    name_of_role,
    role_of_names,
)
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
    Message,
    WireError,
    decode,
    encode,
    split,
)

if TYPE_CHECKING:
    import grpc


_PURPOSE = "Parameter servers in several processes need grpcio"
_SERVICE, _TALK = "distributary.Link", "Talk"
# gRPC has one code for all failures to connect.
_REFUSED = os.strerror(errno.ECONNREFUSED)
_STRANGER = re.compile("TSI_PROTOCOL_FAILURE|Verification Check failed")
_STRANGER_TO_INSECURE = re.compile("failed to connect .*Socket closed")
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
        task: Name of the task, such as `"ps 0"`. The certificate of the task must be for this role.
        credentials: Credentials of this task; None to connect to any program that listens there.

    Raises:
        MissingPackageError: if grpcio is not installed.
    """

    def __init__(self, address: str, task: str, credentials: Credentials | None = None) -> None:
        super().__init__(f"{task} at {address}")
        self._grpc = import_extra("grpc", _PURPOSE)
        self._address = address
        self._role = task.partition(" ")[0]
        self._credentials = credentials

    def _encode(self, message: Message) -> list[Buffer]:
        return encode(message)

    def _converse(self, connection: Connection) -> Exception:
        def chunks() -> Iterator[bytes]:
            """Yields what to send, in a thread of gRPC."""
            for number, buffers in connection.requests():
                yield from split(number, buffers)

        with self._channel() as channel:
            call = channel.stream_stream(f"/{_SERVICE}/{_TALK}")(chunks())
            connection.cancel_at_end(call.cancel)
            try:
                for number, reply in _messages(call):
                    connection.reply(number, reply)
                reason = "it has ended the connection"
            except WireError as error:
                return error
            except self._grpc.RpcError:
                code, details = call.code(), call.details()
                if code == self._grpc.StatusCode.INVALID_ARGUMENT:
                    return WireError(f"{self._name} refuses a message: {details}")
                reason = f"{code.name}: {details}"
        kind = RefusedError if _REFUSED in reason else ConnectionLostError
        # One end does not prove that it belongs to the job of the other.
        if (_STRANGER if self._credentials else _STRANGER_TO_INSECURE).search(reason):
            kind = UnauthenticatedError
            reason += (
                ". Start all tasks of the job with certificates of one authority in"
                f" {CERTIFICATES_VARIABLE}, here of the role {self._role!r}, or all with the same"
                f" {TOKEN_VARIABLE}"
            )
        return kind(f"No connection to {self._name}: {reason}.")

    def _channel(self) -> Any:
        if self._credentials is None:
            return self._grpc.insecure_channel(self._address, _CLIENT_OPTIONS)
        files = self._credentials
        credentials = self._grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
        # The name in a certificate is the role, not the host.
        name = ("grpc.ssl_target_name_override", name_of_role(self._role))
        return self._grpc.secure_channel(self._address, credentials, (*_CLIENT_OPTIONS, name))


def _messages(chunks: Iterable[bytes]) -> Iterator[tuple[int, Message]]:
    """Yields the messages in chunks, with their numbers; raises `WireError`."""
    assembly = Assembly()
    for chunk in chunks:
        if (complete := assembly.add(chunk)) is not None:
            number, buffer = complete
            yield number, decode(buffer)


@final
class GrpcServer:
    """A server through which other tasks call a service, with one thread per link.

    A link takes the memory of one request and one reply at a time.

    Args:
        service: The service that is called.
        address: `"host:port"`, the only address to listen at. Port 0 takes a free port.
        credentials: Credentials of this task: only peers with a certificate of the same authority
            can connect. Those from a secret are enough on a loopback address.
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
        credentials: Credentials | None = None,
        *,
        max_links: int = 256,
        insecure: bool = False,
    ) -> None:
        self._grpc = import_extra("grpc", _PURPOSE)
        self._service = service
        self._is_insecure = credentials is None
        try:
            host, ip_address, port = _resolve(address)
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"Cannot listen at {address}: {error}. Give the address under which the other tasks"
                ' reach this one, such as "10.0.0.1:2222".'
            ) from error
        has_files = credentials is not None and credentials.has_files
        if not (has_files or insecure or ip_address.is_loopback):
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
        methods = {_TALK: self._grpc.stream_stream_rpc_method_handler(self._talk)}
        self._server.add_generic_rpc_handlers(
            (self._grpc.method_handlers_generic_handler(_SERVICE, methods),)
        )
        try:
            listening_at = join_address(str(ip_address), port)
            if credentials is None:
                port = self._server.add_insecure_port(listening_at)
            else:
                pair = (credentials.key, credentials.certificate)
                of_server = self._grpc.ssl_server_credentials(
                    [pair], credentials.ca, require_client_auth=True
                )
                port = self._server.add_secure_port(listening_at, of_server)
        except RuntimeError as error:
            raise ClusterError(
                f"Cannot listen at {address}: {error}. Is the port in use, or the address that of"
                " another machine?"
            ) from error
        self.address = join_address(host, port)
        self._server.start()

    def close(self, seconds: float | None = None) -> None:
        """Ends all connections, and waits for requests that are being handled.

        Args:
            seconds: Longest time to wait for these requests; None to wait until they are done.
        """
        self._server.stop(None).wait(seconds)
        self._threads.join(seconds)

    def _talk(self, chunks: Iterator[bytes], context: "grpc.ServicerContext") -> Iterator[bytes]:
        """Serves one link, in a thread of its own."""
        peer = self._peer(context)  # checked before anything from the caller is read
        if not self._places.acquire(blocking=False):  # only tasks of the job take places
            context.abort(self._grpc.StatusCode.RESOURCE_EXHAUSTED, "All links are in use.")
        try:
            for number, request in _messages(chunks):
                yield from split(number, self._reply(request, peer))
        except WireError as error:
            context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._places.release()

    def _reply(self, request: Message, peer: Peer) -> list[Buffer]:
        try:
            return encode(answer(self._service, request, peer))
        except WireError as error:
            return encode(error_reply(error))

    def _peer(self, context: "grpc.ServicerContext") -> Peer:
        if self._is_insecure:
            return Peer("local", context.peer())
        names = context.auth_context().get("x509_subject_alternative_name", [])
        role = role_of_names([name.decode() for name in names])
        if role is not None:
            return Peer(role, f"{role} at {context.peer()}")
        return context.abort(  # which raises
            self._grpc.StatusCode.UNAUTHENTICATED,
            f"The certificate with the names {names} has no role.",
        )


@final
class _Threads(Executor):
    """An executor with a daemon thread per link, so that a process ends without its peers."""

    def __init__(self) -> None:
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()  # of those that run

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self._futures.add(future)
        threading.Thread(target=run, name="distributary server", daemon=True).start()
        return future

    def join(self, seconds: float | None) -> None:
        """Waits until all functions have returned, or for at most `seconds`."""
        wait(list(self._futures), seconds)


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
    _, sockaddr = bound_address(host, port)
    return host, ipaddress.ip_address(sockaddr[0]), port
