"""Several hosts meet, start, fail and end together; here all of them are on loopback."""

import contextlib
import dataclasses
import select
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from distributary.errors import InvalidValueError, LaunchError
from distributary.launch import HostOptions, LaunchOptions
from distributary.launch._hosts import Master, RemoteLink
from distributary.launch._restarts import Exit, Interrupted, Prepare, Tasks, TaskState

_TOKEN = "0123456789abcdef"
_SECONDS = 30


@pytest.fixture
def start_host(start, address):
    """A function that starts the launcher of one of several hosts."""

    def start_host(rank, *arguments, nnodes="2"):
        hosts = ("--nnodes", nnodes, "--node-rank", rank, "--master", address)
        return start(*hosts, *arguments, environ={"DISTRIBUTARY_TOKEN": _TOKEN})

    return start_host


@pytest.fixture
def hosts(address):
    """A function that makes the options of one of two hosts."""

    def hosts(rank: int, **options) -> HostOptions:
        options = {"num_hosts": 2, "join_seconds": 30, "token": _TOKEN, **options}
        return HostOptions(host_rank=rank, master=address, **options)

    return hosts


@contextlib.contextmanager
def _answering(server: socket.socket, data: bytes) -> Iterator[None]:
    """A program that says something to whoever connects, and leaves."""

    def answer() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):  # who has heard enough hangs up
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(4096)

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join()


@pytest.fixture
def master(hosts):
    """A function that starts a master; it is ended after the test."""
    masters = []

    def master(**options) -> list[str]:
        said: list[str] = []
        job = LaunchOptions(("true",), hosts=hosts(0, **options))
        masters.append(Master(job, said.append))
        return said

    yield master

    for started in masters:
        started._thread.join(_SECONDS)  # its hosts have gone, or do not come
        assert not started._thread.is_alive()


@pytest.fixture
def join(hosts):
    """A function that joins a host; its link is closed before the master ends."""
    links = []

    def join(rank: int, devices: int | None = None, **options) -> RemoteLink:
        master = options.pop("master", None)
        place = hosts(rank, **options)
        if master is not None:
            place = dataclasses.replace(place, master=master)
        links.append(RemoteLink(place, devices))
        return links[-1]

    yield join

    for link in links:
        link.close()


def _receive(link: RemoteLink) -> list:
    """Waits for the next commands."""
    while not (commands := list(link.receive())):  # the first may have come with the handshake
        assert select.select([link], [], [], _SECONDS)[0]
    return commands


def test_a_failure_on_one_host_restarts_both_and_the_last_gives_them_its_code(start_host, script):
    worker = script("""
print(name, restart, len(config["cluster"]["worker"]), "DISTRIBUTARY_TOKEN" in os.environ)
if name != "worker2":
    run_forever()
wait_for(f"worker0.{restart}.pid"), wait_for(f"worker1.{restart}.pid")
print("the reason: ü", file=sys.stderr)
sys.exit(3 + restart)
""")
    first = start_host(0, "--workers", 2, "--max-restarts", 1, worker)
    second = start_host(1, "--max-restarts", 1, worker)

    (out0, err0), (out1, err1) = first.communicate(), second.communicate()
    assert (first.returncode, second.returncode) == (4, 4)
    for restart in range(2):
        assert f"[worker 0] worker0 {restart} 3 False\n" in out0
        assert f"[worker 1] worker1 {restart} 3 False\n" in out0
        assert f"[worker 2] worker2 {restart} 3 False\n" in out1
    assert "host 1: worker 2 ended with exit code 3 after" in err0
    assert "[launcher] worker 2 ended with exit code 3 after" in err1
    assert "[launcher]     the reason: ü\n" in err0
    assert "[worker 2] the reason: ü\n" in err1
    assert "[launcher]     the reason: ü\n" not in err1  # it stands just above


def test_ctrl_c_on_one_host_ends_both(start_host, script, pid_of, wait_until_gone):
    worker = script("run_forever()")
    first, second = (start_host(rank, "--max-restarts", 5, worker) for rank in (0, 1))
    pids = [pid_of("worker0"), pid_of("worker1")]

    second.send_signal(signal.SIGINT)

    (_, err0), _ = first.communicate(), second.communicate()
    assert (first.returncode, second.returncode) == (130, 130)
    assert "host 1: the launcher received SIGINT; ending all workers." in err0
    wait_until_gone(*pids)


def test_a_job_goes_on_without_a_lost_host_and_with_it_again(
    start_host, script, pid_of, wait_until_gone
):
    worker = script("""
print(name, restart, len(config["cluster"]["worker"]))
if restart < 2:
    run_forever()
""")
    start = lambda rank: start_host(rank, "--max-restarts", 1, worker, nnodes="2:3")
    first, second, third = map(start, range(3))
    pids = [pid_of(f"worker{number}") for number in range(3)]

    second.kill()
    second.wait()
    pids += [pid_of("worker0", 1), pid_of("worker1", 1)]
    second = start(1)

    ends = [host.communicate() for host in (first, second, third)]
    assert [host.returncode for host in (first, second, third)] == [0, 0, 0]
    assert [out for out, _ in ends] == [
        "[worker 0] worker0 0 3\n[worker 0] worker0 1 2\n[worker 0] worker0 2 3\n",
        "[worker 1] worker1 2 3\n",
        "[worker 2] worker2 0 3\n[worker 1] worker1 1 2\n[worker 2] worker2 2 3\n",
    ]
    assert "lost the connection to the launcher of host 1 (127.0.0.1)" in ends[0][1]
    assert "starting without host 1, which may join later." in ends[0][1]
    assert "host 1: host 1 has joined; ending all workers for restart 2." in ends[0][1]
    wait_until_gone(*pids)


def test_a_job_starts_with_the_hosts_that_are_enough(start_host, script):
    worker = script('print(name, len(config["cluster"]["worker"]))')
    start = lambda rank: start_host(
        rank, "--join-seconds", 3, "--max-restarts", 1, worker, nnodes="2:3"
    )

    first, third = start(0), start(2)

    (out0, _), (out2, _) = first.communicate(), third.communicate()
    assert (first.returncode, third.returncode) == (0, 0)
    assert (out0, out2) == ("[worker 0] worker0 2\n", "[worker 1] worker1 2\n")


def test_hosts_end_when_the_first_is_killed(start_host, script, pid_of, wait_until_gone):
    worker = script("run_forever()")
    first, second = start_host(0, worker), start_host(1, worker)
    pids = [pid_of("worker0"), pid_of("worker1")]

    first.kill()

    _, stderr = second.communicate()
    assert second.returncode == 1
    assert "the launcher of host 0 at 127.0.0.1:" in stderr
    wait_until_gone(*pids)


@pytest.mark.parametrize(
    ("options", "devices", "reason"),
    [
        (dict(token="x" * 16), None, "its token is not the token of this job"),
        (dict(num_hosts=3), None, "host 1 has --nnodes 3, host 0 has 2"),
        (dict(), 4, "host 1 has --devices-per-worker 4, host 0 has None"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_on_both_sides(options, devices, reason, master, join):
    said = master(join_seconds=0.5)

    with pytest.raises(LaunchError, match=f"refuses host 1: {reason}"):
        join(1, devices, **options)

    assert said == [f"refused a connection from 127.0.0.1: {reason}"]


def test_a_program_in_between_cannot_pass_a_proof_on(master, join, address, impostor):
    said = master(join_seconds=0.5)
    called = impostor("127.0.0.2", address)

    with pytest.raises(LaunchError, match="a program in between passes the connection on"):
        join(1, master=called)

    assert f"has called '{called}', and the master listens at {address}" in said[0]


def test_localhost_is_where_the_master_listens(
    hosts, join, address, impostor, localhost_is_ipv6_first
):
    called = f"localhost:{address.split(':')[1]}"
    place = dataclasses.replace(hosts(0), master=called)
    impostor("::1", address)
    started = Master(LaunchOptions(("true",), hosts=place), lambda line: None)
    links = [join(rank, master=called) for rank in (0, 1)]

    assert _receive(links[0]) == [Prepare(0)]
    for link in links:
        link.close()
    started._thread.join(_SECONDS)


def test_a_host_may_report_more_numbers_than_a_line_holds(master, join):
    master()
    links = [join(0), join(1)]
    state = TaskState(name="worker 1", state="running", has_failed=False, num_restarts=0)
    tasks = Tasks([state], {"worker 1": {f"layer_{i}/gradient_norm": i / 7 for i in range(40_000)}})

    links[1].send(tasks)
    links[1].send(Interrupted(5, "the end"))

    commands = _receive(links[0])
    while not isinstance(commands[-1], Exit):
        commands += _receive(links[0])
    assert commands == [Prepare(0), Exit(5, "the end", 1, [])]


def test_a_rank_is_taken_once(master, join):
    master(join_seconds=0.5)
    join(1)

    with pytest.raises(LaunchError, match=r"--node-rank 1 is taken by 127\.0\.0\.1"):
        join(1)


def test_missing_hosts_are_named_at_the_deadline(master, join):
    master(num_hosts=4, join_seconds=0.5)

    (command,) = _receive(join(1, num_hosts=4))

    assert command.code == 1
    assert "hosts 0, 2, 3 of 4 did not join at 127.0.0.1:" in command.text
    assert "within 0.5 s; joined: host 1 (127.0.0.1)" in command.text


def test_a_missing_master_is_named_at_the_deadline(join, address):
    with pytest.raises(
        LaunchError,
        match=rf"host 1 could not reach the master at {address} within 0.2 s: .*refused",
    ):
        join(1, join_seconds=0.2)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"HTTP/1.1 400\r\n\r\n", "another program"),
        (b"", "another program"),
        (b'["challenge", "x", 0]\n["x", 1, 0]\n', "unexpected message, 'x'.*another program"),
        (b'["challenge", "x", 0]\n["welcome", "y", 0]\n', "does not know the token of this job"),
    ],
)
def test_another_program_at_the_address_is_recognised(said, problem, join, address):
    host, port = address.split(":")
    with (
        socket.create_server((host, int(port))) as server,
        _answering(server, said),
        pytest.raises(LaunchError, match=rf"program .* {address} .*{problem}"),
    ):
        join(1)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"", b'["hello", null, 0]\n', b'["hello", [{}, "x", 3], 0]\n'],
)
def test_strangers_do_not_disturb(said, master, join, address):
    master()
    host, port = address.split(":")

    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(said)
    links = [join(0), join(1)]

    assert _receive(links[0]) == [Prepare(0)]


def test_a_busy_port_is_named(hosts, address):
    host, port = address.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(LaunchError, match=rf"cannot listen on the master address {address}: .*use"),
    ):
        Master(LaunchOptions(("true",), hosts=hosts(0)), print)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(host_rank=2), r"host_rank is 2, but the job has 2 hosts"),
        (dict(master="host"), r"'host': the port is missing"),
        (dict(master="0.0.0.0:1234"), r"stands for every address"),
        (dict(token="short"), r"the token has 5 characters, expected 16 or more"),
        (dict(join_seconds=-1), r"join_seconds is -1"),
    ],
)
def test_impossible_hosts_are_refused(options, match):
    good = dict(num_hosts=2, host_rank=1, master="host:1", token=_TOKEN)

    with pytest.raises(InvalidValueError, match=match):
        HostOptions(**{**good, **options})
