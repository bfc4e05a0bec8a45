"""Only tasks of the job, in their role, are heard: with certificates, or with a secret."""

import contextlib
import datetime
import socket
import stat

import pytest
from cryptography import x509

import distributary as dist
from distributary.cluster_resolver import ClusterSpec, SimpleClusterResolver
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy
from distributary.errors import ClusterError, InvalidValueError
from distributary.launch import free_addresses
from distributary.tools.cli import main
from tests.servers.wire import ROLES, Credentials, make_certificates

_VARIABLES = ("DISTRIBUTARY_CERTS", "DISTRIBUTARY_TOKEN", "TF_CONFIG")
_SECRET, _OTHER_SECRET = "this is the secret of the job", "another job's secret"


@pytest.fixture(scope="module")
def folders(certificates, tmp_path_factory):
    """Certificates of the job, of another authority, and those that have expired."""
    others, expired = (tmp_path_factory.mktemp(name) for name in ("others", "expired"))
    make_certificates(others)
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    make_certificates(expired, num_days=1, start=start)
    return {"job": certificates, "others": others, "expired": expired}


@pytest.fixture
def environment(folders, monkeypatch):
    """A function that sets the credentials of the tasks that are started next."""
    monkeypatch.setattr("distributary.servers._grpc._secrets", [])

    def use(certificates=None, secret=None):
        values = certificates and str(folders[certificates]), secret, "{}"
        for name, value in zip(_VARIABLES, values, strict=True):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return use


@pytest.fixture
def start():
    """A function that starts a worker and a server, and returns their cluster."""
    with contextlib.ExitStack() as stack:

        def start_tasks(host="127.0.0.1", task_types=("worker", "ps"), **options):
            addresses = [a.replace("127.0.0.1", host) for a in free_addresses("127.0.0.1", 2)]
            spec = {"worker": addresses[:1], "ps": addresses[1:]}
            for task_type in task_types:
                stack.callback(dist.Server(spec, task_type, **options)._close)
            return spec

        yield start_tasks


def _train(spec):
    strategy = ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(spec)))
    with contextlib.closing(strategy._cluster):
        with strategy.scope():
            variable = dist.Variable(1.0)
        ClusterCoordinator(strategy).schedule(lambda: variable.assign_add(2.0)).get()
        return variable.numpy()


@pytest.mark.parametrize(
    ("of_tasks", "of_chief", "host"),
    [
        ({"secret": _SECRET}, {"secret": _SECRET}, "127.0.0.1"),
        ({"certificates": "job", "secret": _SECRET}, {"certificates": "job"}, "0.0.0.0"),
        ({}, {}, "0.0.0.0"),
    ],
)
def test_tasks_with_equal_credentials_make_a_job(of_tasks, of_chief, host, environment, start):
    environment(**of_tasks)
    spec = start(host, insecure=not of_tasks)
    environment(**of_chief)

    near = {task: [own[0].replace("0.0.0.0", "127.0.0.1")] for task, own in spec.items()}
    assert _train(near) == 3


@pytest.mark.parametrize(
    ("of_tasks", "of_chief", "reason"),
    [
        ({"secret": _SECRET}, {}, "Socket closed"),
        ({"secret": _SECRET}, {"secret": _OTHER_SECRET}, "handshake failed"),
        ({"certificates": "job"}, {}, "Socket closed"),
        ({"certificates": "job"}, {"secret": _SECRET}, "handshake failed"),
        ({"certificates": "job"}, {"certificates": "others"}, "handshake failed"),
        ({"certificates": "expired"}, {"certificates": "expired"}, "certificate has expired"),
        # Tasks that prove nothing get nothing.
        ({}, {"secret": _SECRET}, "handshake failed"),
    ],
)
def test_strangers_are_refused_at_once(of_tasks, of_chief, reason, environment, start):
    environment(**of_tasks)
    spec = start(insecure=not of_tasks)
    environment(**of_chief)

    with pytest.raises(ClusterError, match=rf"No connection to .*{reason}.* Start all tasks") as e:
        _train(spec)

    assert _SECRET not in str(e.value)
    environment(**of_tasks)
    if "expired" not in of_tasks.values():
        assert _train(spec) == 3


@pytest.mark.parametrize("credentials", [{"secret": _SECRET}, {"certificates": "job"}])
def test_a_server_in_another_role_is_refused(credentials, environment, start):
    environment(**credentials)
    spec = start()

    with pytest.raises(ClusterError, match=r"No connection to \w+ 0.*Verification .*here of the r"):
        _train({"worker": spec["ps"], "ps": spec["worker"]})


def test_a_program_in_between_may_pass_on_what_it_cannot_read(environment, start, impostor):
    environment(secret=_SECRET)
    spec = start()

    assert _train({task: [impostor("127.0.0.2", *own)] for task, own in spec.items()}) == 3


def test_a_stranger_at_another_address_of_localhost_gets_nothing(environment, start):
    environment(secret=_SECRET)
    spec = start("localhost")
    port = int(spec["ps"][0].partition(":")[2])

    with socket.create_server(("::1", port), family=socket.AF_INET6) as stranger:
        stranger.listen()

        assert _train(spec) == 3


def test_connections_that_say_nothing_leave_room_for_the_job(environment, start):
    environment(secret=_SECRET)
    spec = start()
    host, port = spec["ps"][0].split(":")

    with contextlib.ExitStack() as stack:
        for _ in range(300):  # more than a server has links
            stack.enter_context(socket.create_connection((host, port)))

        assert _train(spec) == 3


@pytest.mark.parametrize(
    ("host", "credentials", "reason"),
    [
        ("127.0.0.1", {}, "without a secret .* need the same DISTRIBUTARY_TOKEN, .* insecure=True"),
        ("localhost", {}, "without a secret"),
        ("127.0.0.1", {"secret": "short"}, "DISTRIBUTARY_TOKEN has 5 characters, expected 16 or"),
        ("0.0.0.0", {}, "without certificates"),
        ("0.0.0.0", {"secret": _SECRET}, "without certificates would let .* insecure=True"),
    ],
)
def test_a_server_says_which_credentials_it_needs(host, credentials, reason, environment, start):
    environment(**credentials)

    with pytest.raises(ClusterError, match=reason):
        start(host, ["ps"])


def test_missing_certificates_are_named(environment, folders, start, tmp_path, monkeypatch):
    monkeypatch.setitem(folders, "none", tmp_path)
    environment("none")

    with pytest.raises(ClusterError, match=r"role 'ps' cannot be read: .*ca\.pem.* certs --out"):
        start(task_types=["ps"])
    assert "PRIVATE" not in repr(Credentials.load(folders["job"], "ps"))


def test_the_command_makes_files_that_only_their_owner_reads(tmp_path, capsys):
    folder = tmp_path / "job" / "certs"

    code = main(["certs", "--out", str(folder), "--hosts", "ps-0.jobs", "10.0.0.1", "--days", "3"])

    assert code == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {"ca.pem", *(f"{role}.{end}" for role in ROLES for end in ("pem", "key"))}
    captured = capsys.readouterr()
    assert {path.name for path in map(type(folder), captured.out.split())} == names
    assert f"export DISTRIBUTARY_CERTS={folder}  # for every" in captured.err
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    certificate = x509.load_pem_x509_certificate((folder / "worker.pem").read_bytes())
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    expected = ["worker.distributary", "ps-0.jobs", "10.0.0.1"]
    assert [str(name.value) for name in extension.value] == expected
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=2.9) < left < datetime.timedelta(days=3)


def test_the_command_names_impossible_values_and_writes_over_nothing(
    tmp_path, certificates, capsys
):
    before = (certificates / "ps.key").read_bytes()

    assert main(["certs", "--out", str(tmp_path / "new"), "--hosts", "a b"]) == 1
    assert main(["certs", "--out", str(certificates)]) == 1

    error = capsys.readouterr().err
    assert "distributary certs: 'a b' is neither a host name nor an IP address" in error
    assert "ca.pem exists. All certificates of a job are made together" in error
    assert (certificates / "ps.key").read_bytes() == before
    with pytest.raises(InvalidValueError, match="the number of days is 0, expected 1 or more"):
        make_certificates(tmp_path / "new", num_days=0)
    assert not (tmp_path / "new").exists()
