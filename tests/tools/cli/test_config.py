"""`distributary config`, and the file from which `distributary launch` takes its options."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from distributary.tools.cli import launch_options, main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a script in a folder below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").touch()
    return tmp_path


def _launch(*arguments):
    return launch_options(["launch", *arguments, "job/train.py", "--workers", "9"], {})


def test_options_are_written_and_launch_reads_them(folder, capsys):
    options = ["--workers", "3", "--dashboard", "--log-dir", "logs", "--no-tuning"]

    assert main(["config", *options]) == 0

    assert (folder / "distributary.toml").read_text().splitlines() == [
        "workers = 3",
        'log-dir = "logs"',
        "tuning = false",
        "dashboard = true",
    ]
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["workers", "3", "distributary.toml"] in shown
    assert ["tuning", "false", "distributary.toml"] in shown
    assert ["ps", "0", "default"] in shown
    job = _launch()
    assert (job.num_workers, job.log_dir, job.tune) == (3, Path("logs"), False)
    assert (job.dashboard_port, job.command[2:]) == (0, ("--workers", "9"))


def test_the_command_line_overrides_the_file(folder):
    main(["config", "--workers", "3", "--dashboard", "--max-restarts", "2"])

    job = _launch("--workers", "4", "--no-dashboard")

    assert (job.num_workers, job.dashboard_port, job.max_restarts) == (4, None, 2)


def test_changing_an_option_leaves_the_other_lines(folder):
    file = folder / "distributary.toml"
    file.write_text("# ours\nworkers = 2  # two\n\ngrace-seconds = 9.5\n")

    main(["config", "--workers", "3", "--ps", "1"])

    assert file.read_text() == "# ours\nworkers = 3\n\ngrace-seconds = 9.5\nps = 1\n"


def test_the_file_next_to_the_script_comes_first(folder):
    (folder / "distributary.toml").write_text("workers = 2\nps = 1\n")
    (folder / "job" / "pyproject.toml").write_text(
        '[tool.distributary]\nworkers = 5\nlog-dir = "logs"\n'
    )

    job = _launch()

    assert (job.num_workers, job.num_servers, job.log_dir) == (5, 0, Path("job/logs"))


def test_a_project_without_the_table_does_not_count(folder):
    (folder / "job" / "pyproject.toml").write_text('[project]\nname = "job"\n')
    (folder / "pyproject.toml").write_text("[tool.distributary]\nworkers = 2\n")

    assert _launch().num_workers == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("wrokers = 2", "distributary.toml: there is no option wrokers. Did you mean workers?"),
        ("devices_per_worker = 2", "Did you mean devices-per-worker?"),
        ("workers = 0", "distributary.toml: workers: expected a whole number from 1, found '0'"),
        ("workers = true", "distributary.toml: workers: expected one argument"),
        ("dashboard = 1", "distributary.toml: dashboard is 1, expected true or false"),
        ("workers = [1, 2]", "distributary.toml: workers is [1, 2], expected a number, a text"),
        ("help = true", "there is no option help."),
        ('script = "a.py"', "there is no option script."),
        ("workers = = 2", "distributary.toml cannot be read: "),
    ],
)
@pytest.mark.parametrize("command", [["launch", "job/train.py"], ["config"]])
def test_wrong_files_are_named(folder, command, content, message, capsys):
    (folder / "distributary.toml").write_text(content)

    with pytest.raises(SystemExit, match="2"):
        main(command)

    error = capsys.readouterr().err
    assert message in error
    assert "--" not in error


def test_two_files_with_options_are_refused(folder, capsys):
    (folder / "distributary.toml").write_text("workers = 2\n")
    (folder / "pyproject.toml").write_text("[tool.distributary]\nworkers = 3\n")

    with pytest.raises(SystemExit, match="2"):
        main(["config"])

    assert "both distributary.toml and pyproject.toml have options" in capsys.readouterr().err


def test_a_project_is_not_written(folder, capsys):
    text = "[tool.distributary]\nworkers = 3\n"
    (folder / "pyproject.toml").write_text(text)

    with pytest.raises(SystemExit, match="2"):
        main(["config", "--workers", "4"])

    error = capsys.readouterr().err
    assert "are in pyproject.toml, [tool.distributary]. Change them there" in error
    assert (folder / "pyproject.toml").read_text() == text


def test_the_launcher_says_what_comes_from_the_file(folder):
    (folder / "distributary.toml").write_text("workers = 2\n")
    (folder / "job" / "train.py").write_text("print('trained')\n")

    process = subprocess.run(
        [sys.executable, "-m", "distributary", "launch", "job/train.py"],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )

    assert process.returncode == 0
    first, *_ = process.stderr.splitlines()
    assert first == "distributary launch: options of distributary.toml: --workers=2"
    assert process.stdout.count("trained") == 2


def test_it_asks_on_a_terminal(folder):
    terminal, other = pty.openpty()
    answers = "two\n2\n\n1\n3\n\nmaybe\nyes\n"
    os.write(terminal, answers.encode())

    process = subprocess.run(
        [sys.executable, "-m", "distributary", "config"],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdin=other,
        capture_output=True,
        text=True,
    )
    os.close(other)
    os.close(terminal)

    assert (process.returncode, process.stderr) == (0, "")
    assert "How many workers on this host? [1]" in process.stdout
    assert "expected a whole number from 1, found 'two'" in process.stdout
    assert "expected yes or no, found 'maybe'" in process.stdout
    assert (folder / "distributary.toml").read_text().splitlines() == [
        "workers = 2",
        "ps = 1",
        "max-restarts = 3",
        "dashboard = true",
    ]
