"""Single files are there as a whole, whoever else writes them, and whoever was killed meanwhile."""

import errno
import os
import socket
import stat
from subprocess import PIPE

import pytest

from distributary.checkpoint import complete_file
from tests.forks import Fork

_NAME = "model.weights.h5"
_WRITER = """
import sys
from pathlib import Path
from distributary.checkpoint import complete_file

with complete_file(Path(sys.argv[1])) as path:
    path.write_text("half")
    print("has written half", flush=True)
    sys.stdin.read()
    path.write_text("whole, of another process")
"""


def _hidden(folder):
    return {name for name in os.listdir(folder) if name.startswith(".")}


@pytest.fixture
def start_writer(tmp_path):
    """Starts a process that has written half of a file, and goes on once its stdin is closed."""
    (tmp_path / "writer.py").write_text(_WRITER)
    processes = []

    def start():
        command = [tmp_path / "writer.py", tmp_path / _NAME]
        processes.append(Fork(command, os.environ, stdin=PIPE, stdout=PIPE))
        assert processes[-1].stdout.readline() == "has written half\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.stdin.close()
        process.stdout.close()


def test_what_killed_writers_have_left_is_removed(tmp_path, start_writer):
    host = socket.gethostname()
    others = {f".{_NAME}", f".model.distributary-{host}-01234567.keras", ".model.distributary-h5"}
    for name in others:
        (tmp_path / name).write_text("notes")
    process = start_writer()
    process.kill()
    process.wait(60)
    assert len(_hidden(tmp_path)) == len(others) + 2

    with complete_file(tmp_path / _NAME) as path:
        path.write_text("whole")

    assert _hidden(tmp_path) == others
    assert (tmp_path / _NAME).read_text() == "whole"


def test_writers_that_share_a_host_name_and_number_do_not_meet(tmp_path, start_writer, monkeypatch):
    process = start_writer()
    monkeypatch.setattr(os, "getpid", lambda: process.pid)  # as 1 in each of two containers
    before = _hidden(tmp_path)

    with complete_file(tmp_path / _NAME) as path:
        path.write_text("whole")

    assert _hidden(tmp_path) == before
    assert (tmp_path / _NAME).read_text() == "whole"
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / _NAME).read_text() == "whole, of another process"
    assert _hidden(tmp_path) == set()


def test_a_file_is_saved_where_folders_cannot_be_synced(tmp_path, monkeypatch):
    sync = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with complete_file(tmp_path / "model.keras") as temporary:
        temporary.write_bytes(b"new")

    assert (tmp_path / "model.keras").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["model.keras"]
