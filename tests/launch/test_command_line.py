"""The arguments of `distributary launch`, and the manifests in examples/launch that use them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from distributary.cli import launch_options, main
from distributary.launch import HostOptions

_EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"
_TOKEN = {"DISTRIBUTARY_TOKEN": "0123456789abcdef"}


def test_what_follows_the_script_belongs_to_it():
    options = launch_options(["launch", "--workers", "2", "train.py", "--workers", "3", "-m"], {})

    assert options.num_workers == 2
    assert options.command == (sys.executable, "train.py", "--workers", "3", "-m")


def test_a_module_is_run_as_one():
    options = launch_options(["launch", "-m", "package.train", "--epochs", "3"], {})

    assert options.command == (sys.executable, "-m", "package.train", "--epochs", "3")


def test_every_option_arrives():
    arguments = (
        "launch --workers 2 --devices-per-worker 4 --max-restarts 3 --grace-seconds 1.5"
        " --log-dir logs --evaluator --no-tuning --nnodes 2 --node-rank 1 --master h:29500"
        " --join-seconds 9 --address 10.0.0.2 train.py"
    )

    options = launch_options(arguments.split(), _TOKEN)

    assert (options.num_workers, options.devices_per_worker, options.max_restarts) == (2, 4, 3)
    assert (options.grace_seconds, options.log_dir) == (1.5, Path("logs"))
    assert (options.evaluator, options.tune) == (True, False)
    assert options.hosts == HostOptions(2, 1, "h:29500", "0123456789abcdef", 9.0, "10.0.0.2")


def test_servers_arrive():
    options = launch_options(["launch", "--workers", "2", "--ps", "3", "train.py"], {})

    assert (options.num_workers, options.num_servers) == (2, 3)


def test_the_token_may_come_from_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("fedcba9876543210\n")
    hosts = ["--nnodes", "2", "--node-rank", "1", "--master", "h:1", "--token-file", str(file)]

    options = launch_options(["launch", *hosts, "train.py"], _TOKEN)

    assert options.hosts is not None
    assert options.hosts.token == "fedcba9876543210"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("launch", "the following arguments are required: script"),
        ("launch --workers 0 a.py", "error: num_workers is 0, expected 1 or more"),
        ("launch --ps 1 --nnodes 2 --node-rank 0 --master h:1 a.py", "several hosts need a secret"),
        ("launch --workers two a.py", "argument --workers: invalid int value: 'two'"),
        ("launch --nnodes 2 --master h:1 a.py", "--nnodes is 2, but --node-rank is missing"),
        ("launch --nnodes 2 --node-rank 1 a.py", "--nnodes is 2, but --master is missing"),
        ("launch --nnodes 2 --node-rank 2 --master h:1 a.py", "several hosts need a secret"),
        ("launch --node-rank 1 --master h:1 --token-file /no a.py", "cannot be read"),
        ("launch --work 2 a.py", "unrecognized arguments: --work"),
        ("launch nofile.py", "there is no file 'nofile.py' in /"),
        ("launch -m nomodule", "there is no module 'nomodule' for -m nomodule"),
        ("launch -m nopackage.train", "there is no module 'nopackage' for -m nopackage.train"),
        ("bench nofile.py", "distributary bench: error: there is no file 'nofile.py'"),
        ("bench -m nomodule", "there is no module 'nomodule'"),
        ("compile --topology v5e:2x4 nofile.py", "there is no file 'nofile.py'"),
        ("", "the following arguments are required: COMMAND"),
        ("lunch", "invalid choice: 'lunch'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("DISTRIBUTARY_TOKEN", raising=False)

    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())

    assert message in capsys.readouterr().err


def test_a_log_dir_that_cannot_be_made_is_named(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.touch()

    code = main(["launch", "--log-dir", str(file / "logs"), str(file)])

    assert code == 1
    assert "distributary launch: [Errno 20] Not a directory" in capsys.readouterr().err


def test_the_module_is_the_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")

    process = subprocess.run(
        [sys.executable, "-m", "distributary", "launch", script, "--workers"],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )

    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == "[worker 0] ['--workers']\n"


def test_importing_the_library_does_not_import_the_launcher():
    code = """
import sys, distributary
assert not {m for m in sys.modules if m.startswith(("distributary.launch", "distributary.cli"))}
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("manifest", ["jobset.yaml", "tfjob.yaml", "tfjob-parameter-servers.yaml"])
def test_manifests_are_yaml(manifest):
    yaml = pytest.importorskip("yaml")

    content = yaml.safe_load((_EXAMPLES / manifest).read_text())

    assert content["kind"].lower() == re.split(r"[.-]", manifest)[0]
    assert content["metadata"]["name"] == "train"


def test_the_slurm_script_is_one_for_bash():
    subprocess.run(["bash", "-n", str(_EXAMPLES / "slurm.sh")], check=True)


@pytest.mark.parametrize(
    ("manifest", "num_hosts", "port"), [("jobset.yaml", 4, 29500), ("slurm.sh", 4, 21234)]
)
def test_commands_in_manifests_are_understood(manifest, num_hosts, port):
    variables = {
        "JOB_COMPLETION_INDEX": "3",
        "MASTER": "host0",
        "SLURM_NNODES": "4",
        "SLURM_NODEID": "3",
        "SLURM_JOB_ID": "1234",
        "SLURM_SUBMIT_DIR": "/home/me",
    }
    text = " ".join((_EXAMPLES / manifest).read_text().replace("\\\n", " ").split())
    (command,) = re.findall(r"exec distributary (launch .*? train\.py --checkpoints \S+)", text)

    # The shell itself expands the variables.
    process = subprocess.run(
        ["bash", "-c", f'printf "%s\\n" {command}'],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    options = launch_options(process.stdout.splitlines(), _TOKEN)

    assert options.hosts is not None
    assert (options.hosts.num_hosts, options.hosts.host_rank) == (num_hosts, 3)
    assert options.hosts.master.endswith(f":{port}")
    assert options.command[1] == "train.py"
