"""Without certificates, only who knows the secret of the job is heard."""

import concurrent.futures
import contextlib
import logging
import socket
import traceback

import grpc
import pytest

import distributary as dist
from distributary.cluster_resolver import ClusterSpec, SimpleClusterResolver
from distributary.errors import ClusterError
from distributary.launch import HostOptions, free_addresses
from distributary.servers._grpc import GrpcLink, GrpcServer
from distributary.servers._links import ConnectionLostError, UnauthenticatedError
from distributary.servers._messages import Message
from distributary.servers._permissions import RoleCheck
from distributary.servers._processes import connect, tasks_of
from distributary.servers._store import ParameterServer
from distributary.servers._token import Challenges, Token, credentials_of

_SECONDS = 60.0  # more than anything takes
TOKEN = Token("this is the secret of the job")


@pytest.fixture
def server(service):
    server = GrpcServer(service, "127.0.0.1:0", TOKEN, task="ps 0")
    yield server
    server.close()


def _call(address, task, token):
    link = GrpcLink(address, task, token)
    try:
        return link.call(Message("echo"), _SECONDS)
    finally:
        link.close()


@pytest.mark.parametrize(
    ("task", "token", "text"),
    [
        ("ps 0", None, "does not know the secret of the job of ps 0. Start all tasks"),
        ("ps 0", Token("another job's secret"), "same DISTRIBUTARY_TOKEN"),
        ("ps 1", TOKEN, "takes ps 0 for 'ps 1'. Give all tasks the same cluster"),
        ("worker 0", TOKEN, "takes ps 0 for 'worker 0'"),
    ],
)
def test_strangers_are_refused_and_both_sides_say_so(task, token, text, server, service, caplog):
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            with pytest.raises(UnauthenticatedError, match=f"{task} at .* refuses") as caught:
                _call(server.address, task, token)
            assert text in str(caught.value)

    assert service.handled == []
    first, second = [record for record in caplog.records if "ps 0 refuses" in record.message]
    assert text in first.message
    assert (first.levelname, second.levelname) == ("WARNING", "DEBUG")
    trace = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert TOKEN.secret not in caplog.text + "".join(trace.format())
    assert _call(server.address, "ps 0", TOKEN).kind == "echo"


def test_nothing_of_a_stranger_is_read(server):
    """What no message can be would be said otherwise."""
    with grpc.insecure_channel(server.address) as channel:
        talk = channel.stream_stream("/distributary.Link/Talk")
        strange = [("distributary-proof", "1" * 5000), ("distributary-challenge", "")]
        for metadata in ([], strange, [("distributary-challenge", "a")] * 99):
            call = talk(iter([b"no message"]), metadata=metadata, timeout=_SECONDS)
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_proof_is_good_for_one_call_of_one_task(server):
    with grpc.insecure_channel(server.address) as channel:
        greet = channel.unary_unary("/distributary.Link/Greet")
        talk = channel.stream_stream("/distributary.Link/Talk")

        def code(asked):
            call = talk(iter([]), metadata=[*asked.items()], timeout=_SECONDS)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            return call.code()

        asked = TOKEN.ask("ps 0", server.address, greet(b"").decode())
        assert code(asked) == grpc.StatusCode.OK
        assert code(asked) == grpc.StatusCode.UNAUTHENTICATED
        assert code(TOKEN.ask("ps 0", server.address, "a" * 64)) == grpc.StatusCode.UNAUTHENTICATED
        # Who listens in place of ps 1 gets such a proof, and cannot use it here.
        of_other = {
            **TOKEN.ask("ps 1", server.address, greet(b"").decode()),
            "distributary-task": "ps 0",
        }
        assert code(of_other) == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_a_program_in_between_cannot_pass_a_proof_on(host, server, service, impostor):
    address = impostor(host, server.address)

    with pytest.raises(UnauthenticatedError, match="a program in between passes the call on") as e:
        _call(address, "ps 0", TOKEN)

    assert f"has called '{address}', and ps 0 listens at {server.address}" in str(e.value)
    assert service.handled == []


def test_a_call_of_another_machine_is_refused_too(server, service):
    """A caller that is not on loopback proves no address."""
    with grpc.insecure_channel(server.address) as channel:
        challenge = channel.unary_unary("/distributary.Link/Greet")(b"").decode()
        talk = channel.stream_stream("/distributary.Link/Talk")
        asked = TOKEN.ask("ps 0", "", challenge)
        call = talk(iter([]), metadata=[*asked.items()], timeout=_SECONDS)

        with pytest.raises(grpc.RpcError):
            list(call)

        assert "has called another machine, and ps 0 listens at" in call.details()
        assert "With certificates, calls may be passed on" in call.details()
    assert service.handled == []


def test_localhost_is_where_the_task_listens(service, impostor, request, localhost_is_ipv6_first):
    server = GrpcServer(service, "localhost:0", TOKEN, task="ps 0")
    request.addfinalizer(server.close)
    port = server.address.split(":")[1]
    impostor("::1", f"127.0.0.1:{port}")

    assert _call(f"localhost:{port}", "ps 0", TOKEN).kind == "echo"


def test_challenges_that_nobody_uses_take_no_memory():
    challenges = Challenges()
    first = challenges.new()
    latest = [challenges.new() for _ in range(5000)]

    assert len(challenges._open) == 4096
    assert not challenges.use(first)
    assert challenges.use(latest[-1])
    assert not challenges.use(latest[-1])


def test_a_task_that_does_not_know_the_secret_gets_nothing(service):
    impostor = GrpcServer(service, "127.0.0.1:0", insecure=True)
    try:
        with pytest.raises(UnauthenticatedError, match="does not prove that it is ps 0 of"):
            _call(impostor.address, "ps 0", TOKEN)
    finally:
        impostor.close()

    assert service.handled == []


def test_many_strangers_leave_room_for_the_job(service):
    """Neither calls without the secret nor connections that say nothing hold a place."""
    server = GrpcServer(service, "127.0.0.1:0", TOKEN, task="ps 0", max_links=2)
    host, port = server.address.split(":")
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, port)))
        channels = [stack.enter_context(grpc.insecure_channel(server.address)) for _ in range(8)]
        talks = [channel.stream_stream("/distributary.Link/Talk") for channel in channels]

        def never_ends():
            ended.result(_SECONDS)
            yield b"a"

        ended = concurrent.futures.Future()
        stack.callback(ended.set_result, None)
        greets = [channel.stream_unary("/distributary.Link/Greet") for channel in channels]
        for call in [greet.future(never_ends(), timeout=_SECONDS) for greet in greets * 40]:
            assert len(call.result()) == 64  # which waits for nothing that the stranger sends
        for talk in talks * 4:
            call = talk(never_ends(), timeout=_SECONDS)
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() == grpc.StatusCode.UNAUTHENTICATED
        assert _call(server.address, "ps 0", TOKEN).kind == "echo"


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0"])
def test_loopback_needs_a_secret(address, service):
    with pytest.raises(ClusterError, match=r"need the same DISTRIBUTARY_TOKEN, .* insecure=True"):
        GrpcServer(service, address)


def test_a_secret_does_not_replace_certificates(service):
    with pytest.raises(ClusterError, match=r"Listening at 0\.0\.0\.0:0 without certificates"):
        GrpcServer(service, "0.0.0.0:0", TOKEN)


def test_a_server_started_by_hand_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("DISTRIBUTARY_TOKEN", raising=False)
    worker, ps = free_addresses("127.0.0.1", 2)
    spec = {"worker": [worker], "ps": [ps]}
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(ClusterError, match=f"Listening at {ps} without a secret"):
        dist.Server(spec, "ps")
    monkeypatch.setenv("DISTRIBUTARY_TOKEN", "short")
    with pytest.raises(ClusterError, match="DISTRIBUTARY_TOKEN has 5 characters, expected 16 or"):
        dist.Server(spec, "ps")


@pytest.mark.parametrize("environ", [{}, {"DISTRIBUTARY_TOKEN": "another job's secret"}])
def test_a_chief_without_the_secret_does_not_wait(environ):
    worker, ps = free_addresses("127.0.0.1", 2)
    server = GrpcServer(RoleCheck("ps", 0, ParameterServer(0)), ps, TOKEN, task="ps 0")
    try:
        with pytest.raises(ClusterError, match=f"ps 0 at {ps} refuses this task: it does not know"):
            connect(tasks_of(ClusterSpec({"worker": [worker], "ps": [ps]})), environ)
    finally:
        server.close()


def test_tasks_with_the_secret_make_a_job(monkeypatch):
    monkeypatch.setenv("DISTRIBUTARY_TOKEN", TOKEN.secret)
    worker, ps = free_addresses("127.0.0.1", 2)
    spec = ClusterSpec({"worker": [worker], "ps": [ps]})
    servers = [dist.Server(spec, task_type) for task_type in ("worker", "ps")]
    try:
        strategy = dist.ParameterServerStrategy(SimpleClusterResolver(spec, task_type="chief"))
        with strategy.scope():
            variable = dist.Variable(1.0)
        coordinator = dist.coordinator.ClusterCoordinator(strategy)
        coordinator.schedule(lambda: variable.assign_add(2.0))
        coordinator.join()
        value = variable.numpy()
        strategy._cluster.close()
    finally:
        for server in servers:
            server._server.close()

    assert value == 3


def test_certificates_come_before_the_secret(certificates):
    environ = {"DISTRIBUTARY_CERTS": str(certificates), "DISTRIBUTARY_TOKEN": TOKEN.secret}

    assert credentials_of("ps", {"DISTRIBUTARY_TOKEN": TOKEN.secret}) == TOKEN
    assert credentials_of("ps", environ) == credentials_of(
        "ps", {**environ, "DISTRIBUTARY_TOKEN": ""}
    )
    assert credentials_of("ps", {}) is None


def test_secrets_are_not_shown():
    options = HostOptions(2, 0, "10.0.0.1:1", TOKEN.secret)

    assert TOKEN.secret not in repr(options) + repr(TOKEN) + str(TOKEN)


def test_a_server_that_is_gone_is_no_stranger(server):
    server.close()

    with pytest.raises(ConnectionLostError, match="Connection refused") as caught:
        _call(server.address, "ps 0", TOKEN)
    assert not isinstance(caught.value, UnauthenticatedError)
