"""Certificates that prove the role of a task.

The name in a certificate is `<role>.distributary`. A connection thus proves that the other end is a
task of the job, and which role it has, no matter which host it runs on.
"""

import contextlib
import datetime
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from distributary.errors import ClusterError, InvalidValueError, MissingPackageError, pip_install

if TYPE_CHECKING:
    from cryptography import x509

__all__ = [
    "CERTIFICATES_VARIABLE",
    "ROLES",
    "Credentials",
    "make_certificates",
    "name_of_role",
    "role_of_names",
]

CERTIFICATES_VARIABLE: Final = "DISTRIBUTARY_CERTS"
ROLES: Final = ("chief", "worker", "ps")

_CA_FILE = "ca.pem"
_DOMAIN = ".distributary"
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
# The clocks of a job's machines may differ by this much.
_CLOCK_SKEW = datetime.timedelta(hours=1)


@final
@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificate and key, in PEM, with which a task proves that it belongs to the job.

    Args:
        ca: Certificate of the authority that all tasks of the job trust.
        certificate: Certificate for the role of this task.
        key: Private key of `certificate`.
    """

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

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
            return cls(*((folder / name).read_bytes() for name in (_CA_FILE, *_files(role))))
        except OSError as error:
            raise ClusterError(
                f"The certificates of role {role!r} cannot be read: {error}. `distributary certs"
                f" --out {folder}` makes them; copy {_CA_FILE}, {role}.pem and {role}.key to every"
                " machine with such a task."
            ) from error


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
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise MissingPackageError(
            f"Making certificates needs the package cryptography: {pip_install('ps')}"
        ) from None

    start = start or datetime.datetime.now(datetime.UTC) - _CLOCK_SKEW
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distributary CA")])
    host_names = [_general_name(host) for host in hosts]

    def signed(
        name: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> bytes:
        certificate = (
            x509.CertificateBuilder()
            .issuer_name(ca_name)
            .subject_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + datetime.timedelta(days=num_days))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(ca_key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    constraints = x509.BasicConstraints(ca=True, path_length=0)
    contents = {_CA_FILE: signed(ca_name, ca_key, constraints)}
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name_of_role(role))])
        names = x509.SubjectAlternativeName([x509.DNSName(name_of_role(role)), *host_names])
        certificate_file, key_file = _files(role)
        contents[certificate_file] = signed(name, key, names)
        contents[key_file] = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    return _write(folder, contents)


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


def _write(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
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


def _files(role: str) -> tuple[str, str]:
    return f"{role}.pem", f"{role}.key"
