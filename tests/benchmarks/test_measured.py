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
def comparisons(monkeypatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    return importlib.import_module("_comparisons")


def test_all_run_and_report_what_the_repository_shows_although_one_fails(tmp_path):
    shutil.copytree(_BENCHMARKS, tmp_path / "benchmarks")
    for script, program in (
        ("import_time.py", "raise SystemExit(3)"),
        ("save_time.py", "import sys; open(sys.argv[2] + '/ran', 'w')"),
    ):
        (tmp_path / "benchmarks" / script).write_text(program, encoding="utf-8")
    (tmp_path / _PAGE).parent.mkdir(parents=True)
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    without = re.sub(r"(<!-- measured -->).*(<!-- end of)", r"\1\n\2", readme, flags=re.DOTALL)
    (tmp_path / "README.md").write_text(without, encoding="utf-8")

    process = subprocess.run(
        [sys.executable, tmp_path / "benchmarks/run_all.py", "--only", "import_time,save_time"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert process.returncode == 1
    assert process.stderr.endswith("FAILED: import_time; see above\n")
    assert (tmp_path / "benchmarks/results/ran").exists()
    assert without != readme
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme, _UPDATE
    assert (tmp_path / _PAGE).read_text(encoding="utf-8") == (
        (_ROOT / _PAGE).read_text(encoding="utf-8")
    ), _UPDATE
    assert _fingerprint(tmp_path / _PLOT) == _fingerprint(_ROOT / _PLOT), _UPDATE


def test_ratios_are_those_of_the_rounds(comparisons, tmp_path):
    """Not of the medians: these would be 2.5 / 2."""
    peers = {
        "distributary": [1, 2.5, 6, 1.75, 4],
        "handwritten": [1, 2, 4, 1, 2],
        "tensorflow": [4, 4, 4, 4, 4],
    }
    row = {
        "workload": "mlp32",
        "replicas": 2,
        "bar": 1.05,
        "milliseconds": {name: {"rounds": rounds} for name, rounds in peers.items()},
    }
    document = {"rows": [row]}
    (tmp_path / "step_time.json").write_text(json.dumps(document), encoding="utf-8")

    by_hand, tensorflow = comparisons.compare(comparisons.read(tmp_path))

    names = ("lower_quartile", "median", "upper_quartile")
    assert [by_hand.ratio[name] for name in names] == [1.25, 1.5, 1.75]
    assert [tensorflow.ratio[name] for name in names] == [1.75 / 4, 2.5 / 4, 1]
    assert [found.peer for found in (by_hand, tensorflow)] == ["hand-written JAX", "TensorFlow"]
    assert [found.standing for found in (by_hand, tensorflow)] == [1, 0]
    assert [found.is_over_bar for found in (by_hand, tensorflow)] == [True, False]


def test_every_bar_of_a_stored_result_is_compared(comparisons):
    documents = comparisons.read(_BENCHMARKS / "results")
    for name in ("fit_time", "multi_worker_time"):
        rows = documents[name]["rows"]
        # The files have their rounds to five digits. Some bars hold us against ourselves.
        bars = [
            (round(bar["median"], 3), bar["limit"])
            for row in rows
            for bar in row.get("bars", ())
            if not bar["theirs"].startswith("distributary")
        ]
        # Those of start and memory have ratios of minima in them.
        others = [row["bar"] for row in rows if "against" in row]

        found = [one for one in comparisons.compare({name: documents[name]}) if one.bar]

        own = ("until the first step of `fit`", "resident memory in `fit`")
        compared = [one for one in found if not one.what.startswith(own)]
        assert sorted((round(one.ratio["median"], 3), one.bar) for one in compared) == sorted(bars)
        assert sorted(one.bar for one in found if one.what.startswith(own)) == sorted(others)


def _fingerprint(image: Path) -> bytes:
    return re.search(rb"Description\0[0-9a-f]{64}", image.read_bytes())[0]
