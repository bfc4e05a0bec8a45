"""Whatever ends the launcher, no process of the job is left: the real command, real signals."""

import os
import pty
import signal
import sys
import threading

import psutil
import pytest

_SECONDS = 30
_CHILDREN = """
for i, options in enumerate(({}, {"start_new_session": True})):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], **options)
    put(f"{name}.child{i}.pid", child.pid)
run_forever()
"""
_IGNORES_TERM = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
run_forever()
"""

# Makes stdin the controlling terminal: its Ctrl-C and its end are signals then.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def start_on_terminal(start):
    """A function that starts the launcher on a terminal; returns it and our end of the terminal."""

    def start_on_terminal(*arguments, environ=None):
        terminal, end = pty.openpty()
        launcher = start(
            *arguments,
            stdin=end,
            stdout=end,
            stderr=end,
            environ=environ or {},
            start_new_session=True,
            before=(sys.executable, "-c", _TAKE_TERMINAL),
        )
        os.close(end)
        return launcher, terminal

    return start_on_terminal


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_workers(number, code, script, start, pid_of, wait_until_gone):
    launcher = start("--workers", 2, script(_CHILDREN))
    pids = [pid_of("worker0"), pid_of("worker1")]
    descendants = psutil.Process(launcher.pid).children(recursive=True)

    launcher.send_signal(number)

    _, stderr = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == code
    assert f"the launcher received {number.name}" in stderr
    wait_until_gone(*pids)
    if sys.platform == "linux":
        assert len(descendants) == 8  # per worker: its subreaper, itself, two children
        wait_until_gone(*(process.pid for process in descendants))


def test_a_second_ctrl_c_kills_at_once(script, start, pid_of, wait_until_gone):
    launcher = start("--grace-seconds", 1000, script(_IGNORES_TERM))
    pid = pid_of("worker0")

    launcher.send_signal(signal.SIGINT)
    assert "the launcher received SIGINT" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)

    _, stderr = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 130
    assert "received SIGINT again; ending all workers at once." in stderr
    wait_until_gone(pid)


@pytest.mark.parametrize("text", [_CHILDREN, _IGNORES_TERM])
def test_a_killed_launcher_leaves_nothing(text, script, start, pid_of, wait_until_gone):
    launcher = start("--workers", 2, "--grace-seconds", 0.2, script(text))
    pid_of("worker0")
    pid_of("worker1")
    descendants = [p.pid for p in psutil.Process(launcher.pid).children(recursive=True)]

    launcher.kill()

    wait_until_gone(*descendants)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_subreaper_takes_its_worker_along(script, start, pid_of, wait_until_gone):
    launcher = start(script("run_forever()"))
    pid = pid_of("worker0")

    psutil.Process(pid).parent().kill()

    _, stderr = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 137
    assert "worker 0 was ended by SIGKILL (9)" in stderr
    wait_until_gone(pid)


def test_nohup_is_respected(script, start, pid_of):
    launcher = start(
        script("print('there'); run_forever()"), before=("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    )
    pid_of("worker0")

    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)

    _, stderr = launcher.communicate(timeout=_SECONDS)
    assert launcher.returncode == 143
    assert "SIGHUP" not in stderr


def test_a_closed_terminal_ends_the_job(script, start_on_terminal, pid_of, wait_until_gone):
    worker = script("while True:\n    print('x' * 70)\n    put(f'{name}.0.pid', os.getpid())")
    launcher, terminal = start_on_terminal("--workers", 2, worker)
    reader = threading.Thread(target=_read_until, args=(terminal, b"[worker 1]"))
    reader.start()
    pids = [pid_of("worker0"), pid_of("worker1")]
    reader.join()

    os.close(terminal)

    assert launcher.wait(_SECONDS) == 129
    wait_until_gone(*pids)


def test_ctrl_c_on_the_terminal_reaches_the_launcher_and_workers_may_finish(
    script, start_on_terminal, pid_of
):
    worker = script("""
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
def end(*_):
    print("told to end")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
run_forever()
""")
    launcher, terminal = start_on_terminal(worker, environ={"NO_COLOR": "1"})
    pid_of("worker0")

    os.write(terminal, b"\x03")

    seen = _read_until(terminal, None)
    os.close(terminal)
    assert launcher.wait(_SECONDS) == 130
    assert b"[worker 0] told to end" in seen
    assert b"m[worker 0]" not in seen  # no color
    assert b"interrupted" not in seen


def test_the_terminal_shows_colours_and_a_status_line(script, start_on_terminal, tmp_path):
    worker = script("""
line = json.dumps({"step": 120, "examples_per_second": 5120.4}) + "\\n"
os.write(int(os.environ["DISTRIBUTARY_STATUS_FD"]), line.encode())
print("begun")
wait_for("seen")
""")
    environ = {"TERM": "xterm", "NO_COLOR": ""}
    launcher, terminal = start_on_terminal("--workers", 2, worker, environ=environ)

    seen = _read_until(terminal, b"worker 1: step 120, 5120 examples/s")
    (tmp_path / "seen").touch()
    seen += _read_until(terminal, None)
    os.close(terminal)

    assert launcher.wait(_SECONDS) == 0
    assert b"\x1b[36m[worker 0]\x1b[0m begun" in seen
    assert b"\x1b[33m[worker 1]\x1b[0m begun" in seen
    assert b"2 of 2 running" in seen
    assert seen.endswith(b"\r\x1b[K")  # the line is removed at the end


def test_a_reader_that_stops_reading_stops_no_supervision(script, start, pid_of, wait_until_gone):
    worker = script("""
if name == "worker1":
    run_forever()
put("worker0.0.pid", os.getpid())
while True:
    print("x" * 1000)
""")
    launcher = start("--workers", 2, "--grace-seconds", 0.2, worker)
    pids = [pid_of("worker0"), pid_of("worker1")]  # from here on nobody reads

    launcher.terminate()

    wait_until_gone(*pids)
    assert launcher.wait(_SECONDS) == 143


def test_a_closed_stdout_drops_the_output_and_nothing_else(script, start, tmp_path):
    worker = script("""
print("first")
wait_for("closed")
for _ in range(1000):
    print("x" * 1000)
put("done")
""")
    launcher = start(worker)
    assert launcher.stdout.readline() == "[worker 0] first\n"

    launcher.stdout.close()
    (tmp_path / "closed").touch()

    assert launcher.wait(_SECONDS) == 0
    assert (tmp_path / "done").exists()
    assert "stdout is closed" in launcher.stderr.read()
    launcher.stderr.close()


def _read_until(terminal: int, end: bytes | None) -> bytes:
    """What appears on a terminal until some bytes come, or None for all that comes."""
    seen = b""
    while end is None or end not in seen:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that nobody has the terminal open
            break
        if not data:
            break
        seen += data
    return seen
