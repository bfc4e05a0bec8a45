"""The page and the README's table of measurements are those of the stored result files."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_BENCHMARKS = _ROOT / "benchmarks"
_PAGE = "docs/guide/measured.md"
_PLOT = "docs/images/measured.png"
_UPDATE = "run `python benchmarks/run.py --report-only`"
_OWN = f"""
import os, sys
sys.path.insert(0, {str(_BENCHMARKS)!r})
import _peers

def peers(names, kind):
    first = {{"ours": 1.0, "theirs": 1.1 if kind == "differing" else 1.0}}
    found = [
        _peers.stepping(name, lambda number, loss=first[name]: loss - number / 100, lambda _: None)
        for name in names
    ]
    if kind == "alike":
        for peer in found:
            peer.time_block = lambda count: 2.0 if "earlier" in os.environ["PYTHONPATH"] else 1.0
    return found

if __name__ == "__main__":
    import run
    from _cases import Benchmark, served
    from _harness import Case, pair
    from _processes import Process

    def cases(settings):
        for kind in ("differing", "alike"):
            process = Process(__file__, ("ours", "theirs"), {{"kind": kind}})
            pairs = [pair("ours", "theirs", 2.0), pair("ours", "absent")]
            yield Case(kind, "1", served(process, num_steps=4), pairs, workload=kind)

    run.BENCHMARKS = {{"own": Benchmark(cases, (2, 1))}}
    sys.exit(run.main(["own", *sys.argv[1:]]))
"""
"""A program that measures peers that differ, or say how long they took."""


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    return importlib.import_module("_measured")


def test_the_page_shows_the_stored_results_although_a_benchmark_fails(tmp_path):
    shutil.copytree(_BENCHMARKS, tmp_path / "benchmarks")
    for name, peers in (("import_time", "[][0]"), ("save_time", "[timed(n, list) for n in names]")):
        program = f"from _peers import timed\ndef peers(names):\n    return {peers}\n"
        program = program.replace("list", "lambda count: None")
        (tmp_path / f"benchmarks/{name}.py").write_text(program, encoding="utf-8")
    (tmp_path / "benchmarks/results/save_time.json").unlink()
    shown = {name: (_ROOT / name).read_text(encoding="utf-8") for name in ("README.md", _PAGE)}
    (tmp_path / _PAGE).parent.mkdir(parents=True)
    for name, text in shown.items():
        without = re.sub(r"(<!-- table: .+? -->).*?(<!-- end)", r"\1\n\2", text, flags=re.DOTALL)
        assert without != text
        (tmp_path / name).write_text(without, encoding="utf-8")

    program = str(tmp_path / "benchmarks/run.py")
    process = _run(program, "import_time", "save_time", "--rounds", "1")

    assert process.returncode == 1
    (failed,) = (line for line in process.stderr.splitlines() if line.startswith("FAILED"))
    assert failed.startswith("FAILED: import_time: jax: process 0 ended")
    assert "IndexError: list index out of range" in process.stderr
    assert (tmp_path / "benchmarks/results/save_time.json").exists()
    for name, text in shown.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text, _UPDATE
    assert _fingerprint(tmp_path / _PLOT) == _fingerprint(_ROOT / _PLOT), _UPDATE


def test_ratios_are_those_of_the_rounds(measured, tmp_path):
    """Not of the medians: these would be 2.5 / 2."""
    row = {
        "replicas": "2",
        "unit": "ms/step",
        "rounds": {
            "distributary": [1, 2.5, 6, 1.75, 4],
            "handwritten": [1, 2, 4, 1, 2],
            "tensorflow": [4, 4, 4, 4, 4],
        },
        "pairs": [
            {"what": "a step", "ours": "distributary", "theirs": theirs, "bar": bar}
            for theirs, bar in (("handwritten", 1.05), ("tensorflow", None))
        ],
    }
    (tmp_path / "step_time.json").write_text(json.dumps({"rows": [row]}), encoding="utf-8")

    by_hand, tensorflow = measured.compare(measured.read(tmp_path))

    names = ("lower_quartile", "median", "upper_quartile")
    assert [by_hand.ratio[name] for name in names] == [1.25, 1.5, 1.75]
    assert [tensorflow.ratio[name] for name in names] == [1.75 / 4, 2.5 / 4, 1]
    assert [found.peer for found in (by_hand, tensorflow)] == ["hand-written JAX", "TensorFlow"]
    assert [found.standing for found in (by_hand, tensorflow)] == [1, 0]
    assert [found.is_over_bar for found in (by_hand, tensorflow)] == [True, False]


def test_differing_losses_end_with_1_and_another_commit_is_measured_in_turns_with_this_one(
    tmp_path,
):
    program, earlier = tmp_path / "own.py", str(tmp_path / "earlier")
    program.write_text(_OWN, encoding="utf-8")
    rows_of = lambda: json.loads((tmp_path / "own.json").read_text(encoding="utf-8"))["rows"]

    process = _run(str(program), "--output", str(tmp_path))

    assert process.returncode == 1
    assert re.findall("^FAILED.{33}", process.stderr, re.M) == [
        "FAILED: differing: the losses of theirs"
    ]
    assert [row["what"] for row in rows_of()] == ["differing", "alike"]
    for row in rows_of():
        assert {name: len(values) for name, values in row["rounds"].items()} == dict(
            ours=2, theirs=2
        )
        assert [pair["theirs"] for pair in row["pairs"]] == ["theirs"]

    process = _run(str(program), "--only", "alike", "--before", earlier, "--output", str(tmp_path))

    assert process.returncode == 0, process.stderr
    (row,) = rows_of()
    times = {"ours before": [2000, 2000], "ours": [1000, 1000], "ours control": [2000, 2000]}
    assert row["rounds"] == times
    pairs = [(pair["ours"], pair["theirs"]) for pair in row["pairs"]]
    assert pairs == [("ours", "ours before"), ("ours control", "ours before")]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def _fingerprint(image: Path) -> bytes:
    return re.search(rb"Description\0[0-9a-f]{64}", image.read_bytes())[0]
