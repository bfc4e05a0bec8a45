"""Links over gRPC, and the certificates by which they prove the role of a task.

Each link uses one stream, which lasts as long as its connection.

The name in a certificate is `<role>.distributary`. A connection thus proves that the other end is a
task of the job, and which role it has, no matter which host it runs on.

The tasks of a job on one machine need no files: each derives the same key from the secret of the
job, and signs its certificate with it. A program that does not know the secret can neither accept
nor make such a connection, and one that passes connections on cannot read them.
"""

import contextlib
import datetime
import errno
import functools
import hashlib
import importlib
import ipaddress
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, final

from distributary.cluster_resolver import TOKEN_VARIABLE, join_address, split_port
from distributary.errors import ClusterError, InvalidValueError, MissingPackageError, pip_install
from distributary.job import bound_address
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
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec


# Packages that an extra of distributary installs.


def import_extra(package: str, purpose: str, extra: str = "ps") -> ModuleType:
    """Imports a package when it is needed.

    Args:
        package: Name of the package.
        purpose: Begin of the message if it is not installed: what needs it.
        extra: The extra that installs it.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingPackageError(f"{purpose}: {pip_install(extra)}") from None


# Certificates

CERTIFICATES_VARIABLE: Final = "DISTRIBUTARY_CERTS"
ROLES: Final = ("chief", "worker", "ps")

_PURPOSE = "Making certificates needs the package cryptography"
_CA_FILE = "ca.pem"
_DOMAIN = ".distributary"
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
# The clocks of a job's machines may differ by this much.
_CLOCK_SKEW = datetime.timedelta(hours=1)
_MIN_CHARACTERS = 16
# Of the keys that are derived from a secret.
_TIMES = datetime.datetime(2020, 1, 1), datetime.datetime(9999, 1, 1)
_ORDER_OF_P256 = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@final
@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificate and key, in PEM, with which a task proves that it belongs to the job.

    Args:
        ca: Certificate of the authority that all tasks of the job trust.
        certificate: Certificate for the role of this task.
        key: Private key of `certificate`.
        has_files: Whether they come from files, and not from a secret: only these are enough at
            addresses that other machines reach.
    """

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    has_files: bool = True

    @classmethod
    def load(cls, folder: Path, role: str) -> "Credentials":
        """Reads the credentials of a role from a folder written by `make_certificates`.

        Args:
            folder: The folder, with the files `ca.pem`, `<role>.pem` and `<role>.key`.
            role: `"chief"`, `"worker"` or `"ps"`.

        Raises:
            ClusterError: if a file cannot be read.
        """
        try:
            ca, cert, key = ((folder / name).read_bytes() for name in (_CA_FILE, *_files(role)))
            return cls(ca, cert, key)
        except OSError as error:
            raise ClusterError(
                f"The certificates of role {role!r} cannot be read: {error}. `distributary certs"
                f" --out {folder}` makes them; copy {_CA_FILE}, {role}.pem and {role}.key to every"
                " machine with such a task."
            ) from error

    @classmethod
    @functools.lru_cache(maxsize=8)
    def from_secret(cls, secret: str, role: str) -> "Credentials":
        """Returns the credentials of a role that every task can make from the secret of the job.

        Args:
            secret: Text of 16 characters or more.
            role: `"chief"`, `"worker"` or `"ps"`.

        Raises:
            ClusterError: if the secret is shorter.
            MissingPackageError: if the package cryptography is not installed.
        """
        if len(secret) < _MIN_CHARACTERS:
            raise ClusterError(
                f"{TOKEN_VARIABLE} has {len(secret)} characters, expected {_MIN_CHARACTERS} or"
                " more. `openssl rand -hex 16` makes one; give all tasks of the job the same."
            )
        import_extra("cryptography", _PURPOSE)
        from cryptography.hazmat.primitives.asymmetric import ec

        # Slow on purpose: whoever sees a certificate can try secrets.
        content = hashlib.scrypt(secret.encode(), salt=b"distributary", n=1 << 14, r=8, p=1)
        number = int.from_bytes(content) % (_ORDER_OF_P256 - 1) + 1
        key = ec.derive_private_key(number, ec.SECP256R1())
        ca = _signed(None, key, key, *_TIMES)
        return cls(ca, _signed(role, key, key, *_TIMES), _key_content(key), has_files=False)


_secrets: list[str] = []


def credentials_of_this_process(role: str, *, make: bool = False) -> Credentials | None:
    """Returns the credentials of tasks that share a process with their chief, as in tutorials.

    Args:
        role: `"chief"`, `"worker"` or `"ps"`.
        make: Whether to make a secret for them if there is none yet.
    """
    if make and not _secrets:
        _secrets.append(secrets.token_hex(32))
    return Credentials.from_secret(_secrets[0], role) if _secrets else None


def credentials_of(role: str, environ: Mapping[str, str]) -> Credentials | None:
    """Returns the credentials with which a task proves that it belongs to the job.

    Args:
        role: `"chief"`, `"worker"` or `"ps"`.
        environ: The environment.

    Returns:
        The certificates in `DISTRIBUTARY_CERTS`, else those from the secret in
        `DISTRIBUTARY_TOKEN`, else None.

    Raises:
        ClusterError: if a file cannot be read, or the secret is too short.
    """
    if folder := environ.get(CERTIFICATES_VARIABLE):
        return Credentials.load(Path(folder), role)
    secret = environ.get(TOKEN_VARIABLE)
    return Credentials.from_secret(secret, role) if secret else None


def make_certificates(
    folder: Path,
    hosts: Sequence[str] = (),
    num_days: int = 365,
    start: datetime.datetime | None = None,
) -> list[Path]:
    """Writes the certificates of a new authority, with keys that only their owner can read.

    The key of the authority is not kept, so nobody can make more certificates that the job trusts.

    Args:
        folder: The folder to write: `ca.pem`, and `<role>.pem` and `<role>.key` for every role. It
            is created if it does not exist.
        hosts: Additional host names or IP addresses for the certificates. The tasks of a job do not
            need them, but other programs may check the name of the host they connect to.
        num_days: Number of days that the certificates are valid.
        start: Start of that time. None means an hour ago, as the clocks of machines differ.

    Returns:
        The paths of the files.

    Raises:
        InvalidValueError: if the number of days is not positive, or a host is neither a host name
            nor an IP address.
        FileExistsError: if one of the files exists.
        MissingPackageError: if the package cryptography is not installed.
    """
    if num_days < 1:
        raise InvalidValueError(f"certs: the number of days is {num_days}, expected 1 or more.")
    import_extra("cryptography", _PURPOSE)
    from cryptography.hazmat.primitives.asymmetric import ec

    start = start or datetime.datetime.now(datetime.UTC) - _CLOCK_SKEW
    times = start, start + datetime.timedelta(days=num_days)
    names = [_general_name(host) for host in hosts]
    ca_key = ec.generate_private_key(ec.SECP256R1())
    contents = {_CA_FILE: _signed(None, ca_key, ca_key, *times)}
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate_file, key_file = _files(role)
        contents[certificate_file] = _signed(role, key, ca_key, *times, names)
        contents[key_file] = _key_content(key)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = [folder / name for name in contents]
    for path in paths:
        # Checked before any file is written, so that every key still matches its certificate.
        if path.exists():
            raise FileExistsError(
                f"{path} exists. All certificates of a job are made together: choose another"
                " folder, or remove the old ones when no task needs them any more."
            )
    for path, content in zip(paths, contents.values(), strict=True):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    return paths


def _signed(
    role: str | None,
    key: "ec.EllipticCurvePrivateKey",
    ca_key: "ec.EllipticCurvePrivateKey",
    start: datetime.datetime,
    end: datetime.datetime,
    names: "Sequence[x509.GeneralName]" = (),
) -> bytes:
    """Returns the certificate of a role, or of the authority itself, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    subject = ca = "distributary CA"
    extension: x509.ExtensionType = x509.BasicConstraints(ca=True, path_length=0)
    if role is not None:
        subject = name_of_role(role)
        extension = x509.SubjectAlternativeName([x509.DNSName(subject), *names])
    certificate = (
        x509.CertificateBuilder()
        .issuer_name(name(ca))
        .subject_name(name(subject))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(extension, critical=role is None)
        .sign(ca_key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_content(key: "ec.EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def name_of_role(role: str) -> str:
    """Returns the name in the certificate of a role."""
    return role + _DOMAIN


def role_of_names(names: Sequence[str]) -> str | None:
    """Returns the role among the names of a certificate; None if there are none or several."""
    roles = [role for role in ROLES if name_of_role(role) in names]
    return roles[0] if len(roles) == 1 else None


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not _HOST.fullmatch(host):
        raise InvalidValueError(
            f"certs: {host!r} is neither a host name nor an IP address. Separate several hosts by"
            " spaces, such as --hosts train.example.com 10.0.0.1."
        )
    return x509.DNSName(host)


def _files(role: str) -> tuple[str, str]:
    return f"{role}.pem", f"{role}.key"


_NEEDS_GRPC = "Parameter servers in several processes need grpcio"
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
        self._grpc = import_extra("grpc", _NEEDS_GRPC)
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
        self._grpc = import_extra("grpc", _NEEDS_GRPC)
        self._service = service
        self._is_insecure = credentials is None
        try:
            host, text = split_port(address)
            if not host or text is None:
                raise ValueError("it is not host:port")
            # The task listens at the IP address that is checked below.
            _, (bound, port, *_) = bound_address(host, int(text))
            ip_address = ipaddress.ip_address(bound)
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
        self._server = self._grpc.server(
            self._threads, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=max_links
        )
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
        try:
            for number, request in _messages(chunks):
                yield from split(number, self._reply(request, peer))
        except WireError as error:
            context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, str(error))

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
