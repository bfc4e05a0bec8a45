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
_UPDATE = "run `python benchmarks/run_all.py --report-only`"


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    return importlib.import_module("_measured")


def test_all_run_and_report_what_the_repository_shows_although_one_fails(tmp_path):
    shutil.copytree(_BENCHMARKS, tmp_path / "benchmarks")
    for script, program in (
        ("import_time.py", "raise SystemExit(3)"),
        ("save_time.py", "import sys; open(sys.argv[2] + '/ran', 'w')"),
    ):
        (tmp_path / "benchmarks" / script).write_text(program, encoding="utf-8")
    shown = {name: (_ROOT / name).read_text(encoding="utf-8") for name in ("README.md", _PAGE)}
    (tmp_path / _PAGE).parent.mkdir(parents=True)
    for name, text in shown.items():
        without = re.sub(r"(<!-- table: .+? -->).*?(<!-- end)", r"\1\n\2", text, flags=re.DOTALL)
        assert without != text
        (tmp_path / name).write_text(without, encoding="utf-8")

    process = subprocess.run(
        [sys.executable, tmp_path / "benchmarks/run_all.py", "--only", "import_time,save_time"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert process.returncode == 1
    assert process.stderr.endswith("FAILED: import_time; see above\n")
    assert (tmp_path / "benchmarks/results/ran").exists()
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


def test_a_failing_process_and_differing_losses_end_with_1_and_others_are_written(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(
        f"""
import sys
sys.path.insert(0, {str(_BENCHMARKS)!r})
import _harness, _peers

def requests(arguments):
    return [{{"replicas": 1, "name": name}} for name in arguments.only]

def measure(request):
    if request["name"] == "failing":
        raise SystemExit(3)
    peers = [
        _peers.stepping(name, lambda number, loss=loss: loss - number / 100, lambda loss: None)
        for name, loss in (("ours", 1.0), ("theirs", 1.0 if request["name"] == "alike" else 1.1))
    ]
    pairs = [_harness.pair("ours", "theirs", 2.0), _harness.pair("ours", "absent")]
    return [_harness.compare(request, request["name"], peers, pairs)]

options = {{"--only": {{"choices": ("failing", "differing", "alike")}}}}
_harness.run(requests, measure, rounds=(2, 1), options=options)
""",
        encoding="utf-8",
    )

    process = subprocess.run(
        [sys.executable, program, "--output", tmp_path, "--block-seconds", "0.001"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert process.returncode == 1
    failed = [line for line in process.stderr.splitlines() if line.startswith("FAILED")]
    assert [line[:39] for line in failed] == [
        "FAILED: exit status 3 for {'rounds': 2,",
        "FAILED: differing: the losses of theirs",
    ]
    rows = json.loads((tmp_path / "own.json").read_text(encoding="utf-8"))["rows"]
    assert [row["what"] for row in rows] == ["differing", "alike"]
    for row in rows:
        assert {name: len(values) for name, values in row["rounds"].items()} == {
            "ours": 2,
            "theirs": 2,
        }
        assert [pair["theirs"] for pair in row["pairs"]] == ["theirs"]


def _fingerprint(image: Path) -> bytes:
    return re.search(rb"Description\0[0-9a-f]{64}", image.read_bytes())[0]
