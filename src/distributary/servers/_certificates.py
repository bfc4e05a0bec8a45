"""Certificates that prove the role of a task.

The name in a certificate is `<role>.distributary`. A connection thus proves that the other end is a
task of the job, and which role it has, no matter which host it runs on.

The tasks of a job on one machine need no files: each derives the same key from the secret of the
job, and signs its certificate with it. A program that does not know the secret can neither accept
nor make such a connection, and one that passes connections on cannot read them.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib
import ipaddress
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, final

from distributary.cluster_resolver import TOKEN_VARIABLE
from distributary.errors import ClusterError, InvalidValueError, MissingPackageError, pip_install

if TYPE_CHECKING:
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
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
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
