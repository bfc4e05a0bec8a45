"""The arguments of `distributary launch`."""

import runpy
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from distributary.launch import HostOptions
from distributary.tools.cli import _arguments, _main, launch_options, main
from distributary.tools.compilation import known_topologies
from tests.interpreters import run_python

_TOKEN = {"DISTRIBUTARY_TOKEN": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("--workers 2 train.py --workers 3 -m", "train.py --workers 3 -m"),
        ("--workers 2 -m package.train --epochs 3", "-m package.train --epochs 3"),
    ],
)
def test_what_follows_the_script_or_module_belongs_to_it(arguments, command):
    options = launch_options(["launch", *arguments.split()], {})

    assert options.num_workers == 2
    assert options.command == (sys.executable, *command.split())


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


def test_the_token_may_come_from_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("fedcba9876543210\n")
    hosts = ["--nnodes", "2", "--node-rank", "1", "--master", "h:1", "--token-file", str(file)]

    options = launch_options(["launch", *hosts, "train.py"], _TOKEN)

    assert options.hosts is not None
    assert options.hosts.token == "fedcba9876543210"


_COMMANDS = ("launch", "devices", "doctor", "bench", "certs", "compile", "plan")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("launch", "launch: error: the following arguments are required: script\n"),
        ("launch --workers two a.py", "--workers: expected a whole number from 1, found 'two'"),
        ("launch --dashboard-port 65536 a.py", "from 0 to 65535, found '65536'"),
        ("launch --nnodes 2 --master h:1 a.py", "--nnodes is 2, but --node-rank is missing"),
        ("launch --nnodes 2 --node-rank 1 a.py", "--nnodes is 2, but --master is missing"),
        ("launch --nnodes 2 --node-rank 1 --master h:1 a.py", "several hosts need a secret"),
        ("launch --master h:1 a.py", "--master is for a job on several hosts, but --nnodes"),
        ("launch --nnodes 2 --node-rank 1 --master h:1 --token-file /no a.py", "cannot be read"),
        ("launch --wrokers 2 a.py", "there is no option --wrokers. Did you mean --workers?"),
        ("launch --epochs 3 a.py", "no option --epochs. Options of the script come after the scri"),
        ("launch nofile.py", "there is no file 'nofile.py' in /"),
        ("launch trian.py", "Did you mean train.py"),
        ("launch --nproc_per_node 2 a.py", "no option --nproc_per_node. Did you mean --workers?"),
        ("launch train.ipynb", "is a notebook. Write it as a script first: jupyter nbconvert"),
        ("launch .", "'.' is a folder without a __main__.py"),
        ("launch -m nomodule", "there is no module 'nomodule' for -m nomodule"),
        ("launch -m json", "there is no module 'json.__main__' for -m json"),
        ("bench --replicas 1,x", "expected whole numbers from 1 with commas between them"),
        ("launch -n 2 a.py", "no option -n. Did you mean --workers?"),
        ("launch -m train.py", "Leave out -m for a file."),
        ("bench --model mpl", "there is no 'mpl'; known are mlp, transformer. Did you mean mlp?"),
        ("bench --model mlp a.py", "--model is for a built-in model, but there is the script"),
        ("bench --step train", "--step is for a script"),
        ("bench --json train.py", "train.py is a Python script, which would be overwritten"),
        ("bench --plot plot.pdf", "expected NAME.png, found 'plot.pdf'"),
        ("bench --replicas 1,3 --global-batch 64", "64 is not divisible by 3 replicas"),
        ("bench --gbit 0", "--gbit: expected a number above 0, found '0'"),
        ("compile a.py", "usage: distributary compile --topology NAME [OPTION ...] SCRIPT"),
        ("plan a.py", "usage: distributary plan --topology NAME [OPTION ...] SCRIPT"),
        ("doctor --only linsk", "there is no 'linsk'; known are machine, links, all-reduce, train"),
        ("devices extra", "distributary devices: error: 'extra' is one argument too many"),
        ("certs --out c --days 0", "--days: expected a whole number from 1, found '0'"),
        ("", "usage: distributary [-h] [--version] COMMAND ..."),
        ("lunch", "there is no command 'lunch'. Did you mean launch?"),
        ("train.py", "To run a script: distributary launch train.py."),
        ("run train.py", "there is no command 'run'. Did you mean launch?"),
        ("--vresion", "there is no option --vresion. Did you mean --version?"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("DISTRIBUTARY_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "train.py"):
        (tmp_path / name).touch()

    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())

    error = capsys.readouterr().err
    assert message in error
    command = arguments.split(" ")[0]
    prog = f"distributary {command}" if command in _COMMANDS else "distributary"
    assert error.startswith(f"usage: {prog} ")
    assert (tmp_path / "train.py").read_text() == ""


def test_help_and_messages_come_without_jax(tmp_path):
    code = f"""
import io, sys, contextlib
from distributary.tools.cli import main
lines = [[name, "--help"] for name in {_COMMANDS}] + [["--help"], ["--version"], ["launch", "no"]]
for line in lines:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(line)
        except SystemExit:
            pass
print({{"jax", "numpy", "keras"}} & set(sys.modules) or "none")
"""
    process = run_python("-c", code, cwd=tmp_path)

    assert (process.stdout, process.stderr) == ("none\n", "")


def test_a_launcher_needs_no_jax(tmp_path):
    (tmp_path / "worker.py").write_text("import jax")
    code = """
import sys
sys.modules["jax"] = sys.modules["numpy"] = None  # an import fails
from distributary.tools.cli import main
sys.exit(main(["launch", "--nnodes", "1", "--workers", "2", "--dashboard", "worker.py"]))
"""
    process = run_python("-c", code, cwd=tmp_path)

    assert process.returncode == 0, process.stderr


def test_the_help_knows_what_the_commands_know():
    loop = runpy.run_module("distributary.tools.scaling._training_loop", run_name="loop")
    assert tuple(loop["MODELS"]) == _main._MODELS
    assert known_topologies() == _arguments._TOPOLOGIES


def test_versions_are_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])

    assert f"distributary {version('distributary')}, jax {version('jax')}, " in (
        capsys.readouterr().out
    )


def test_what_cannot_be_made_or_served_is_named(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            (("--log-dir", str(file / "logs")), f"--log-dir {file / 'logs'} cannot be made: Not a"),
            (("--dashboard-port", str(port)), f"at 127.0.0.1, port {port}: Address already in use"),
        ):
            assert main(["launch", *arguments, str(file)]) == 1
            assert message in capsys.readouterr().err
