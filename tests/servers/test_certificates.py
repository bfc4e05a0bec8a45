"""Only tasks of the job, in their role, are heard."""

import datetime
import stat

import pytest
from cryptography import x509

from distributary.errors import ClusterError, InvalidValueError
from distributary.servers._certificates import ROLES, Credentials, make_certificates
from distributary.servers._grpc import GrpcLink, GrpcServer
from distributary.servers._links import ConnectionLostError
from distributary.servers._messages import Message
from distributary.servers._token import credentials_of
from distributary.tools.cli import main

_SECONDS = 60.0


@pytest.fixture
def server(service, certificates):
    server = GrpcServer(service, "127.0.0.1:0", Credentials.load(certificates, "ps"))
    yield server
    server.close()


def _call(address, role, credentials):
    link = GrpcLink(address, role, credentials)
    try:
        return link.call(Message("echo"), _SECONDS)
    finally:
        link.close()


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """Certificates of another authority."""
    folder = tmp_path_factory.mktemp("strangers")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def expired(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expired")
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    make_certificates(folder, num_days=1, start=start)
    return folder


@pytest.mark.parametrize("role", ROLES)
def test_the_role_of_the_caller_is_known(role, server, service, certificates):
    _call(server.address, "ps", Credentials.load(certificates, role))

    (peer,) = service.peers
    assert peer.role == role
    assert peer.identity.startswith(f"{role} at ipv4:127.0.0.1:")


def test_strangers_are_refused(server, service, certificates, strangers):
    stranger, member = (Credentials.load(f, "worker") for f in (strangers, certificates))
    both = Credentials(member.ca, stranger.certificate, stranger.key)

    for credentials in (None, stranger, both):
        with pytest.raises(ConnectionLostError, match=f"No connection to ps at {server.address}"):
            _call(server.address, "ps", credentials)

    assert service.handled == []
    _call(server.address, "ps", member)


def test_a_server_in_another_role_is_refused(server, service, certificates):
    with pytest.raises(ConnectionLostError, match="certificate must be that of role 'chief'"):
        _call(server.address, "chief", Credentials.load(certificates, "worker"))

    assert service.handled == []


def test_a_server_without_certificate_is_refused(service, certificates):
    server = GrpcServer(service, "127.0.0.1:0", insecure=True)
    try:
        with pytest.raises(ConnectionLostError, match="UNAVAILABLE"):
            _call(server.address, "ps", Credentials.load(certificates, "worker"))
    finally:
        server.close()

    assert service.handled == []


def test_expired_certificates_are_refused(service, expired):
    server = GrpcServer(service, "127.0.0.1:0", Credentials.load(expired, "ps"))
    try:
        with pytest.raises(ConnectionLostError, match="certificate has expired"):
            _call(server.address, "ps", Credentials.load(expired, "worker"))
    finally:
        server.close()

    assert service.handled == []


def test_with_certificates_any_address_may_be_listened_at(service, certificates):
    server = GrpcServer(service, "0.0.0.0:0", Credentials.load(certificates, "ps"))
    try:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        _call(address, "ps", Credentials.load(certificates, "chief"))
    finally:
        server.close()

    assert service.handled == [None]


def test_a_program_in_between_may_pass_calls_on(server, service, certificates, impostor):
    address = impostor("127.0.0.2", server.address)

    reply = _call(address, "ps", Credentials.load(certificates, "worker"))

    assert reply.kind == "echo"
    (peer,) = service.peers
    assert peer.role == "worker"


def test_the_command_makes_files_that_only_their_owner_reads(tmp_path, capsys):
    folder = tmp_path / "job" / "certs"

    code = main(["certs", "--out", str(folder), "--hosts", "ps-0.jobs", "10.0.0.1", "--days", "3"])

    assert code == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {"ca.pem", *(f"{role}.{end}" for role in ROLES for end in ("pem", "key"))}
    assert {path.name for path in map(type(folder), capsys.readouterr().out.split())} == names
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    certificate = x509.load_pem_x509_certificate((folder / "worker.pem").read_bytes())
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert [str(name.value) for name in extension.value] == [
        "worker.distributary",
        "ps-0.jobs",
        "10.0.0.1",
    ]
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=2.9) < left < datetime.timedelta(days=3)


def test_impossible_values_are_named(tmp_path, capsys):
    assert main(["certs", "--out", str(tmp_path / "new"), "--hosts", "a b"]) == 1

    error = capsys.readouterr().err
    assert "distributary certs: 'a b' is neither a host name nor an IP address" in error
    with pytest.raises(InvalidValueError, match="the number of days is 0, expected 1 or more"):
        make_certificates(tmp_path / "new", num_days=0)
    assert not (tmp_path / "new").exists()


def test_the_next_step_is_said(tmp_path, capsys):
    assert main(["certs", "--out", str(tmp_path / "new")]) == 0

    assert f"export DISTRIBUTARY_CERTS={tmp_path / 'new'}  # for every" in capsys.readouterr().err


def test_files_are_not_written_over(certificates, capsys):
    before = (certificates / "ps.key").read_bytes()

    assert main(["certs", "--out", str(certificates)]) == 1

    assert "ca.pem exists. All certificates of a job are made together" in capsys.readouterr().err
    assert (certificates / "ps.key").read_bytes() == before


def test_the_folder_comes_from_the_environment(certificates, tmp_path):
    found = credentials_of("ps", {"DISTRIBUTARY_CERTS": str(certificates)})

    assert found == Credentials.load(certificates, "ps")
    assert "PRIVATE" not in repr(found)
    assert credentials_of("ps", {}) is None
    with pytest.raises(ClusterError, match=r"role 'ps' cannot be read: .*ca\.pem.* certs --out"):
        credentials_of("ps", {"DISTRIBUTARY_CERTS": str(tmp_path)})
