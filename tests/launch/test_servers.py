"""Jobs with a chief, workers and parameter servers."""

import json
import os
import signal

import pytest

from tests.forks import Fork


def test_every_task_finds_itself_and_the_others(launch):
    script = """
print(sorted((t, len(a)) for t, a in config["cluster"].items()), config["task"])
if name == "chief0":
    wait_for("ps0.0.pid"), wait_for("worker0.0.pid"), wait_for("worker1.0.pid")
    sys.exit(0)
run_forever()
"""
    result = launch(script, num_workers=2, num_servers=1)

    assert result.code == 0
    assert result.stderr.startswith("[launcher] no worker has made a strategy.")
    cluster = "[('chief', 1), ('ps', 1), ('worker', 2)]"
    assert sorted(result.stdout.splitlines()) == [
        f"[chief 0] {cluster} {{'type': 'chief', 'index': 0}}",
        f"[ps 0] {cluster} {{'type': 'ps', 'index': 0}}",
        f"[worker 0] {cluster} {{'type': 'worker', 'index': 0}}",
        f"[worker 1] {cluster} {{'type': 'worker', 'index': 1}}",
    ]


def test_workers_and_servers_are_started_again_alone_and_the_chief_with_all(launch, tmp_path):
    script = """
put(f"{name}.{restart}", config["cluster"])
if name == "worker1" and restart == 0:
    wait_for("chief0.0"), wait_for("worker0.0"), wait_for("ps0.0")
    subprocess.Popen(["sleep", "1000"])  # ends, too, before the next one starts
    os.kill(os.getpid(), signal.SIGKILL)
if name == "ps0" and restart == 0:
    wait_for("worker1.1")
    sys.exit(3)
if name == "chief0" and restart == 0:
    wait_for("ps0.2")
    sys.exit(9)
if name == "chief0":
    wait_for("worker0.3"), wait_for("worker1.3"), wait_for("ps0.3")
    sys.exit(0)
run_forever()
"""
    result = launch(script, num_workers=2, num_servers=1, max_restarts=3, log_dir=tmp_path / "log")

    assert result.code == 0
    assert "[launcher] worker 1 was ended by SIGKILL (9) after" in result.stderr
    assert "; starting it again, restart 1 of 3." in result.stderr
    assert "[launcher] ps 0 ended with exit code 3 after" in result.stderr
    assert "[launcher] chief 0 ended with exit code 9 after" in result.stderr
    assert "ending all workers for restart 3 of 3" in result.stderr
    names = {path.name for path in tmp_path.glob("*[0-9].[0-9]")}
    first = {"chief0.0", "ps0.0", "ps0.2", "worker0.0", "worker1.0", "worker1.1"}
    assert names - first == {"chief0.3", "ps0.3", "worker0.3", "worker1.3"}
    assert len({(tmp_path / name).read_text() for name in first}) == 1
    logs = {path.name for path in (tmp_path / "log").iterdir()}
    assert {"ps-0.restart-2.log", "worker-1.restart-1.log", "chief-0.restart-3.log"} <= logs


def test_the_tasks_share_a_secret_that_nobody_else_gets(launch, tmp_path):
    script = """
put(f"{name}.secret", os.environ.get("DISTRIBUTARY_TOKEN", "none"))
if name == "worker0" and restart == 0:
    sys.exit(3)
if name == "chief0":
    for other in ("ps0", "worker0", "worker1", "evaluator0"):
        wait_for(f"{other}.secret")
    wait_for("worker0.1.pid")
    lines = [p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
    put("is_shown", any(os.environ["DISTRIBUTARY_TOKEN"].encode() in line for line in lines))
    sys.exit(0)
run_forever()
"""
    secrets = []
    for _ in range(2):
        result = launch(
            script,
            environ={"DISTRIBUTARY_TOKEN": "that of the user"},
            num_workers=2,
            num_servers=1,
            evaluator=True,
            max_restarts=1,
            log_dir=tmp_path / "log",
        )
        assert result.code == 0, result.stderr
        names = ("chief0", "ps0", "worker0", "worker1", "evaluator0")
        *of_tasks, of_evaluator = [(tmp_path / f"{n}.secret").read_text() for n in names]
        assert of_evaluator == "none"
        assert (tmp_path / "is_shown").read_text() == "False"
        (secret,) = set(of_tasks)
        logs = [path.read_text() for path in (tmp_path / "log").iterdir()]
        assert secret not in "".join([result.stdout, result.stderr, *logs])
        secrets.append(secret)
        for path in (*tmp_path.glob("*.secret"), *tmp_path.glob("*.pid")):
            path.unlink()

    assert len({*secrets, "that of the user", "none"}) == 4
    assert min(map(len, secrets)) == 64


def test_a_server_that_ends_well_is_named(script, start):
    process = start("--ps", 1, script('if name != "ps0":\n    run_forever()'))

    assert "[launcher] ps 0 ended before the chief" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143


def test_a_program_that_does_not_fit_its_job_is_refused_once(launch, tmp_path):
    script = """
import distributary as dist
dist.MirroredStrategy(["CPU:0"])
put(f"{name}.trained")
"""
    result = launch(script, num_workers=2, max_restarts=2)

    assert result.code == 78
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("[launcher]")]
    text = "MirroredStrategy: the cluster has 2 workers, and nothing connects them: each would t"
    assert line.startswith(f"[launcher] {text}")
    assert "Use MultiWorkerMirroredStrategy, or start one worker" in line
    assert list(tmp_path.glob("*.trained")) == []


_TWO_WORKERS = {"worker": ["h:1", "h:2"]}
_WITH_SERVERS = {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]}
_MODEL = """
import os
import numpy as np
import distributary.compat.tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((4, 2)), np.ones(4)
"""


@pytest.mark.parametrize(
    ("program", "cluster", "said"),
    [
        (
            _MODEL + "model.fit(x, y)",
            _TWO_WORKERS,
            "sequential.fit without a strategy: the cluster has 2 workers, and nothing connects t",
        ),
        (
            "import distributary as dist; dist.MirroredStrategy(['CPU:0'])",
            _WITH_SERVERS,
            "MirroredStrategy: the cluster has 1 parameter server(s)",
        ),
        (
            _MODEL + "model.evaluate(x, y)\ndel os.environ['TF_CONFIG']\n"
            "tf.distribute.MirroredStrategy()",
            _TWO_WORKERS,
            "",
        ),
    ],
)
def test_without_a_launcher_programs_that_do_not_fit_raise(program, cluster, said, tmp_path):
    file, output = tmp_path / "program.py", tmp_path / "output"
    file.write_text(program)
    config = {"cluster": cluster, "task": {"type": min(cluster), "index": 0}}
    with output.open("w") as written:
        environ = os.environ | {"TF_CONFIG": json.dumps(config)}
        code = Fork([file], environ, stdout=written).wait(100)

    assert (code, said in output.read_text()) == (int(bool(said)), True)


@pytest.mark.parametrize(("num_workers", "is_said"), [(1, False), (2, True)])
def test_workers_without_a_strategy_are_told_that_they_worked_alone(num_workers, is_said, launch):
    result = launch("pass", num_workers=num_workers)

    assert result.code == 0
    assert result.stderr.startswith("[launcher] no worker has made a strategy.") is is_said
