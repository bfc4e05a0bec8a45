"""A job from its start to its exit code."""

import os
import re
import signal
import sys

import pytest

from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.launch import HostOptions, LaunchOptions, run


def test_workers_find_themselves_in_tf_config_and_arguments_reach_them_as_they_are(launch):
    script = 'print(name, *config["cluster"]["worker"], sys.argv[1:])'

    result = launch(script, "--workers", "a b", "", "'", num_workers=2)

    assert result.code == 0
    arguments = re.escape(repr(["--workers", "a b", "", "'"]))
    for number, line in enumerate(sorted(result.stdout.splitlines())):
        address = r"127\.0\.0\.1:(\d+)"
        own = rf"\[worker {number}\] worker{number}"
        match = re.fullmatch(f"{own} {address} {address} {arguments}", line)
        assert match[1] != match[2]
    assert "[worker" not in result.stderr


@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        ("sys.exit(3)", 3, "worker 1 ended with exit code 3 after"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker 1 was ended by SIGKILL (9) after"),
    ],
)
def test_a_failing_worker_ends_the_job_with_its_code(ending, code, text, launch):
    script = f"if name == 'worker1':\n    {ending}\nrun_forever()"

    result = launch(script, num_workers=2)

    assert result.code == code
    assert text in result.stderr


def test_a_job_that_cannot_start_with_all_workers_goes_on_with_fewer(launch):
    script = """
put(f"{restart}.{name}", len(config["cluster"]["worker"]))
if restart == 0 and name == "worker2":
    wait_for("0.worker0"), wait_for("0.worker1")
    os.kill(os.getpid(), signal.SIGKILL)
if restart == 1 and name == "worker0":
    os.write(int(os.environ["DISTRIBUTARY_STATUS_FD"]), b'{"step": 1}\\n')
    put("stepped")
if restart == 1 and name == "worker1":
    wait_for("stepped")
    os.kill(os.getpid(), signal.SIGKILL)
if restart < 2:
    run_forever()
print(name, *(len(list(folder.glob(f"{i}.worker?"))) for i in range(2)))
"""
    result = launch(script, num_workers=3, min_workers=2, max_restarts=2, grace_seconds=1)

    assert result.code == 0, result.stderr
    lines = sorted(line.partition("] ")[2] for line in result.stdout.splitlines())
    assert lines == [f"worker{i} 3 2" for i in range(3)]
    assert "no worker has reported a step, so 2 of 3 workers start" in result.stderr


_LINES = """
def end(*_):
    print("cleaned up")
    sys.exit(0)

if name == "worker0" and "--both" in sys.argv:
    signal.signal(signal.SIGTERM, end)
    put("ready")
    run_forever()
if "--both" in sys.argv:
    wait_for("ready")
for i in range(50):
    print("line", i, file=sys.stderr)
sys.stderr.write("no end of line")
sys.exit(1)
"""


def test_last_lines_of_the_failed_worker_are_repeated_below_those_of_others(launch):
    result = launch(_LINES, "--both", num_workers=2)

    _, _, repeated = result.stderr.partition("Its last lines on stderr:\n")
    expected = [f"[launcher]     line {i}" for i in range(31, 50)]
    assert repeated.splitlines() == [*expected, "[launcher]     no end of line"]


def test_what_stands_at_the_end_is_not_repeated(launch):
    result = launch(_LINES)

    *_, last, said = result.stderr.splitlines()
    assert last == "[worker 0] no end of line"
    assert re.fullmatch(
        r"\[launcher\] worker 0 ended with exit code 1 after .* s; ending all workers\.", said
    )


def test_noise_of_gloo_is_left_out(launch):
    line = (
        "[Gloo] Rank {} is connected to {} peer ranks. Expected number of connected peer ranks is"
        " : {}"
    )
    script = f"""
for numbers in ((0, 1, 1), (0, 12, 12), (0, 1, 2)):
    print({line!r}.format(*numbers), flush=True)
"""
    result = launch(script)

    assert result.stdout == f"[worker 0] {line.format(0, 1, 2)}\n"


# Workers that end because another one was lost are not taken for the one that was.
_ENDED_BECAUSE_OF_ANOTHER = """
if name == "worker0":
    print("  File", end=" ", file=sys.stderr)  # a traceback of another thread, under way
    print("distributary: worker 7 was lost", file=sys.stderr)
    sys.exit(75)
if name == "worker1":
    sys.exit(3)
run_forever()
"""


def test_the_worker_that_was_lost_is_named(launch):
    result = launch(_ENDED_BECAUSE_OF_ANOTHER, num_workers=3)

    assert result.code == 3
    assert "[launcher] worker 1 ended with exit code 3" in result.stderr


def test_without_another_the_first_that_ended_tells_the_reason(launch):
    result = launch(_ENDED_BECAUSE_OF_ANOTHER)

    assert result.code == 75
    assert ": worker 7 was lost; ending all workers." in result.stderr


def test_the_reason_is_not_repeated_with_the_last_lines(launch):
    script = """
def end(*_):
    print("cleaned up", file=sys.stderr)
    sys.exit(0)

if name == "worker0":
    signal.signal(signal.SIGTERM, end)
    put("ready")
    run_forever()
wait_for("ready")
print("distributary: worker 7 was lost", file=sys.stderr)
sys.exit(75)
"""
    result = launch(script, num_workers=2)

    own = [line for line in result.stderr.splitlines() if "[launcher] worker 1 ended" in line]
    assert [": worker 7 was lost" in line for line in own] == [True, False], result.stderr
    assert own[1].endswith(" s. Its last lines on stderr:")


def test_a_stopped_worker_gets_its_term(launch):
    script = """
if name == "worker0":
    def end(*_):
        print("cleaned up")
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    put("ready", os.getpid())
    run_forever()
wait_for("ready")
os.kill(int((folder / "ready").read_text()), signal.SIGSTOP)
sys.exit(5)
"""
    result = launch(script, num_workers=2)

    assert result.code == 5
    assert "[worker 0] cleaned up\n" in result.stdout


def test_a_worker_that_ends_well_does_not_end_the_others(launch):
    script = """
if name == "worker1":
    put("done")
else:
    wait_for("done")
    print("still here")
"""
    result = launch(script, num_workers=2)

    assert (result.code, result.stdout) == (0, "[worker 0] still here\n")


def test_restarts_count_up_and_take_new_ports(launch, tmp_path):
    script = """
put(f"{name}.{restart}", config["cluster"]["worker"])
if restart < 2:
    if name == "worker1":
        wait_for(f"worker0.{restart}")
        sys.exit(7)
    run_forever()
print("through", restart)
"""
    result = launch(script, num_workers=2, max_restarts=3)

    assert result.code == 0
    assert sorted(result.stdout.splitlines()) == ["[worker 0] through 2", "[worker 1] through 2"]
    assert "ending all workers for restart 1 of 3." in result.stderr
    assert "ending all workers for restart 2 of 3." in result.stderr
    clusters = [(tmp_path / f"worker0.{i}").read_text() for i in range(3)]
    assert len(set(clusters)) == 3


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_worker_leaves_behind_is_ended(ending, launch, tmp_path, wait_until_gone):
    script = f"""
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(100)"
for options in ({{}}, {{"start_new_session": True}}):
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, **options)
    child.stdout.readline()
    with (folder / "children").open("a") as file:
        print(child.pid, file=file)
{ending}
"""
    launch(script, grace_seconds=0.2)

    usual, in_own_session = map(int, (tmp_path / "children").read_text().split())
    wait_until_gone(usual)
    if sys.platform == "linux":
        wait_until_gone(in_own_session)


def test_a_command_that_does_not_exist_is_named(capfd, tmp_path):
    code = run(LaunchOptions(("/no/such/program",)))

    assert code == 127
    assert "cannot start '/no/such/program': No such file or directory" in capfd.readouterr().err


def test_the_evaluator_is_a_task_outside_of_the_cluster(launch):
    script = """
print(sorted(config["cluster"]), len(config["cluster"]["worker"]))
put(name)
if name == "evaluator0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run_forever()
wait_for("evaluator0.0.pid")
"""
    result = launch(script, num_workers=2, evaluator=True)

    assert result.code == 0
    assert "[evaluator 0] ['worker'] 2" in result.stdout.splitlines()


def test_an_evaluator_that_fails_ends_the_job(launch):
    script = "sys.exit(4) if name == 'evaluator0' else run_forever()"

    result = launch(script, evaluator=True)

    assert result.code == 4
    assert "evaluator 0 ended with exit code 4" in result.stderr


_PRINT_SETTINGS = """
for variable in ("JAX_NUM_CPU_DEVICES", "PJRT_NPROC", "MALLOC_TOP_PAD_", "DISTRIBUTARY_TOKEN"):
    print(variable, os.environ.get(variable))
"""


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        (  # more than half of the cores of any machine
            {"devices_per_worker": 500},
            {"JAX_NUM_CPU_DEVICES": "3", "DISTRIBUTARY_TOKEN": "secret"},
            ["500", "1000", "67108864" if sys.platform == "linux" else None, None],
        ),
        ({}, {"JAX_NUM_CPU_DEVICES": "3", "PJRT_NPROC": "5", "MALLOC_TOP_PAD_": "7"}, list("357")),
        ({"tune": False, "devices_per_worker": 500}, {}, ["500", None, None, None]),
    ],
    ids=["devices", "settings of the user", "switched off"],
)
def test_devices_and_settings_are_in_the_environment(options, environ, expected, launch):
    result = launch(_PRINT_SETTINGS, environ=environ, **options)

    values = [line.rpartition(" ")[2] for line in result.stdout.splitlines()]
    assert values[: len(expected)] == list(map(str, expected))
    replaced = "JAX_NUM_CPU_DEVICES=3 is set here; workers get 500 instead"
    assert (replaced in result.stderr) is ("devices_per_worker" in options and bool(environ))


def test_workers_of_one_device_share_the_cores(launch):
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()

    result = launch(_PRINT_SETTINGS, num_workers=2)

    expected = {1: "None"}.get(num_cores, str(num_cores // 2))
    assert result.stdout.count(f"PJRT_NPROC {expected}\n") == 2


def test_a_tf_config_of_the_user_is_replaced_and_named(launch):
    result = launch("print(name)", environ={"TF_CONFIG": "{}"})

    assert result.stdout == "[worker 0] worker0\n"
    assert "TF_CONFIG is set here" in result.stderr


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(command=()), "no command"),
        (dict(num_workers=0), "num_workers is 0, expected 1 or more"),
        (dict(devices_per_worker=0), "devices_per_worker is 0"),
        (dict(max_restarts=-1), "max_restarts is -1"),
        (dict(num_workers=3, min_workers=2), "max_restarts is 0"),
        (dict(num_workers=3, min_workers=4, max_restarts=1), "4, but num_workers is only 3"),
        (dict(num_workers=3, min_workers=2, max_restarts=1, num_servers=1), "starts again alone"),
        (dict(grace_seconds=-1), "grace_seconds is -1"),
        (dict(grace_seconds=float("nan")), "grace_seconds is nan"),
        (dict(num_workers=1.5), r"num_workers is 1\.5"),
        (dict(num_servers=-1), "num_servers is -1"),
        (dict(num_servers=1, hosts=HostOptions(2, 0, "10.0.0.1:1", "x" * 16)), "job on 2 hosts"),
    ],
)
def test_impossible_options_are_refused(options, match):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=match):
        LaunchOptions(**{"command": ("true",), **options})


def test_no_descriptor_and_no_handler_is_left(launch):
    launch("")
    before = sorted(os.listdir("/dev/fd")), signal.getsignal(signal.SIGTERM)

    launch("sys.exit(restart == 0)", num_workers=2, max_restarts=1, evaluator=True)

    assert (sorted(os.listdir("/dev/fd")), signal.getsignal(signal.SIGTERM)) == before
