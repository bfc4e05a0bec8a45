"""The page that shows a run: who may read it, and what a browser makes of it."""

import html
import http.client
import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import distributary as dist
from distributary.devices import progress
from distributary.errors import InvalidValueError
from distributary.launch import report
from tests.launch.conftest import start  # noqa: F401 - a fixture

_PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 120.0  # more than anything takes
_CHROMIUM_OPTIONS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --dump-dom
    --disable-background-networking --disable-component-update --virtual-time-budget=3000
"""


def _get(url, path="/", method="GET"):
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=_SECONDS)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def test_the_page_is_one_file_that_asks_for_numbers_here_only(strategy_of):
    with dist.experimental.dashboard(strategy_of(2)) as dashboard:
        status, headers, page = _get(dashboard.url)
        numbers = json.loads(_get(dashboard.url, "/stats.json?first=0")[2])
        paths = ("/etc/passwd", "/../../etc/passwd", "//etc/passwd", "/page.html")
        missing = {_get(dashboard.url, path)[0] for path in paths}
        posted, _, _ = _get(dashboard.url, method="POST")
        first = _wait_for(dashboard.url, lambda numbers: numbers["next"] >= 1)
        rest = json.loads(_get(dashboard.url, f"/stats.json?first={first['next']}")[2])

    assert (status, missing, posted) == (200, {404}, 501)
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert not re.search(rb"(src|href)=\"(?!data:,)|https?://(?!www\.w3\.org/2000/svg)", page)
    assert numbers["title"] == "MirroredStrategy, 2 replicas"
    assert numbers["tasks"][0]["devices"] == ["CPU:0", "CPU:1"]
    # Samples come once.
    assert len(first["samples"]) == first["next"]
    assert len(rest["samples"]) == rest["next"] - first["next"]
    assert first["samples"][0]["tasks"]["this process"]["num_replicas"] == 2


def test_ports_are_checked_and_given_back(strategy_of):
    strategy = strategy_of(1)
    with pytest.raises(InvalidValueError, match="port is 65536"):
        dist.experimental.dashboard(strategy, 65536)
    with dist.experimental.dashboard(strategy) as dashboard:
        port = urlsplit(dashboard.url).port
        with pytest.raises(OSError, match="in use"):
            dist.experimental.dashboard(strategy, port)

    with dist.experimental.dashboard(strategy, port) as again:
        assert urlsplit(again.url).port == port


# Real jobs. Their programs train, and go on when there is a file "seen".


@pytest.fixture
def launch(start, tmp_path):  # noqa: F811
    """A function that launches a program with a dashboard, and returns the page's address."""

    def launch(program, *arguments):
        program, environ = _PROGRAMS / program, {"DISTRIBUTARY_TOKEN": "0123456789abcdef"}
        process = start("--dashboard", *arguments, program, tmp_path / "seen", environ=environ)
        for line in process.stderr:
            if found := re.search(r"The dashboard is at (\S+)", line):
                return process, found[1]
        raise AssertionError("the launcher has ended")

    return launch


def _wait_for(url, condition):
    end = time.monotonic() + _SECONDS
    while True:
        numbers = json.loads(_get(url, "/stats.json")[2])
        if condition(numbers):
            return numbers
        assert time.monotonic() < end, numbers
        time.sleep(0.05)


def _latest(numbers, task):
    return numbers["samples"][-1]["tasks"].get(task, {}) if numbers["samples"] else {}


def _seen_by_chromium(url, tmp_path):
    """The text of the page by the ids of elements, its charts by their names, and all of it.

    The page's scripts have run for a while.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium; the numbers that the page shows were checked")
    command = [
        chromium,
        *_CHROMIUM_OPTIONS.split(),
        f"--user-data-dir={tmp_path / 'chromium'}",
        url,
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if process.returncode:
        pytest.skip(f"Chromium cannot run here: {process.stderr[-500:]}")
    page = process.stdout
    element = r'(?=<(\w+)[^>]* id="([\w-]+)"[^>]*>(.*?)</\1>)'
    parts = re.findall(element, page, flags=re.DOTALL)
    text = {name: html.unescape(re.sub(r"<[^>]*>", " ", part)) for _, name, part in parts}
    charts = re.findall(r'<svg[^>]*aria-label="([^"]*)"', page)
    assert text["live"] == "live", page
    return text, charts, page


def test_a_browser_shows_two_workers(launch, tmp_path):
    process, url = launch("two_workers.py", "--workers", "2")
    has_all = lambda worker: worker.get("num_steps") == 38 and "loss" in worker
    numbers = _wait_for(url, lambda n: all(has_all(_latest(n, f"worker {i}")) for i in range(2)))

    try:
        for i in range(2):
            worker = _latest(numbers, f"worker {i}")
            assert (worker["num_steps"], worker["num_examples"]) == (38, 40 * 4)
            assert worker["collective_bytes"] == 40 * 8 * 4
            assert (worker["num_replicas"], worker["loss"]) == (2, 0.25)
            assert 0 < worker["compute_seconds"] <= worker["seconds"]
        text, charts, _ = _seen_by_chromium(url, tmp_path)
        assert text["title"] == "2 of 2 running"
        assert (text["number-steps"], text["number-loss"]) == ("38", "0.25")
        assert {"Loss", "Examples per second"} <= set(charts)
        assert re.search(r"worker 0\s+running\s+38.*worker 1\s+running\s+38", text["tasks"])
    finally:
        (tmp_path / "seen").touch()
        assert process.wait(_SECONDS) == 0


def test_the_page_tells_who_left_a_job_that_shrinks(launch, tmp_path):
    shrinking = ("--workers", "1:2", "--max-restarts", "1")
    process, url = launch("one_that_leaves.py", *shrinking)

    try:
        has_restarted = lambda n: any(task["num_restarts"] for task in n["tasks"])
        numbers = _wait_for(url, lambda n: n["title"] == "1 of 1 running" and has_restarted(n))
        text, _, _ = _seen_by_chromium(url, tmp_path)
    finally:
        (tmp_path / "seen").touch()
        assert process.wait(_SECONDS) == 0
    said = " ".join(message for _, message in numbers["messages"])
    assert re.search(r"worker 1 .*SIGKILL.* restart 1", said), said
    assert re.search(r"worker 1 .*SIGKILL", text["messages"])
    assert [task["num_restarts"] for task in numbers["tasks"]] == [1]


def test_host_0_shows_the_tasks_of_all_hosts(launch, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{listener.getsockname()[1]}"
    hosts = ("--nnodes", "2", "--master", master)
    first, url = launch("one_number.py", *hosts, "--node-rank", "0", "--workers", "2")
    second, url_of_second = launch("one_number.py", *hosts, "--node-rank", "1")

    try:
        steps = lambda numbers: [_latest(numbers, f"worker {i}").get("step") for i in range(3)]
        numbers = _wait_for(url, lambda n: steps(n) == [10, 11, 12])
        own = _wait_for(url_of_second, lambda n: steps(n) == [None, None, 12])
        assert numbers["title"] == "3 of 3 running"
        assert re.search(r" on 2 hosts$", numbers["subtitle"])
        assert [(task["name"], task["host"]) for task in numbers["tasks"]] == [
            ("worker 0", 0),
            ("worker 1", 0),
            ("worker 2", 1),
        ]
        assert own["title"] == "1 of 1 running"
        assert re.search(r", host 1 of 2$", own["subtitle"])
        text, _, _ = _seen_by_chromium(url, tmp_path)
        assert re.search(
            r"worker 1, host 0\s+running\s+11.*worker 2, host 1\s+running\s+12", text["tasks"]
        )
    finally:
        (tmp_path / "seen").touch()
        assert [process.wait(_SECONDS) for process in (first, second)] == [0, 0]


def test_a_browser_shows_parameter_servers_and_round_numbers_in_charts(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "values", {})
    report(accuracy=0.06)
    with dist.experimental.local_cluster(workers=1, ps=1) as cluster:
        strategy = dist.ParameterServerStrategy(cluster)
        with strategy.scope():
            variable = dist.Variable(np.zeros(3, np.float32))
        coordinator = dist.experimental.coordinator.ClusterCoordinator(strategy)
        step = lambda: variable.assign_add(np.ones(3, np.float32))
        for _ in range(20):
            coordinator.schedule(step)
        coordinator.join()
        with dist.experimental.dashboard(strategy) as dashboard:
            _wait_for(dashboard.url, lambda numbers: numbers["next"] >= 1)
            report(accuracy=0.95)
            chief_of = lambda numbers: _latest(numbers, "this process")
            numbers = _wait_for(dashboard.url, lambda n: chief_of(n).get("accuracy") == 0.95)
            text, charts, page = _seen_by_chromium(dashboard.url, tmp_path)

    chief = chief_of(numbers)
    assert chief["coordinator/num_done"] == chief["coordinator/servers/0/num_pushes"] == 20
    assert chief["coordinator/workers/0/num_closures"] == 20
    assert text["number-steps"] == "20"
    assert "Steps that wait for a worker, or run on one" in charts
    assert re.search(r"worker 0\s+20\s", text["workers"])
    assert re.search(r"ps 0\s+20\s", text["servers"])
    chart = page.partition("<h2>accuracy</h2>")[2].partition("</section>")[0]
    assert re.findall(r">(\d\.\d)<", chart) == ["0.0", "0.5", "1.0"]  # not 0.5 alone
