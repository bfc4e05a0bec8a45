"""Layouts that the GPU compiler compares, with numbers that are known about the model."""

import json

import pytest

GIB = 1 << 30
WEIGHTS = 4 * GIB  # of `large.py`, in float32; a step moves them in bfloat16
LAYOUTS = ["--layout", "mirrored", "--layout", "sharded parameters"]


@pytest.fixture
def plan_of(run_program, tmp_path):
    def plan(*arguments):
        file = tmp_path / "plan.json"
        printed = run_program("plans.py", "--json", str(file), *arguments)
        (found,) = json.loads(file.read_text())
        return found, printed

    return plan


def test_a_plan_has_the_compilers_numbers_and_takes_no_memory_for_the_model(plan_of):
    plan, printed = plan_of("--topology", "h100:2", *LAYOUTS, "large.py")

    assert 1024 * int(printed.splitlines()[-1]) < 2 * GIB
    rows = plan["rows"]
    names = [row["layout"] for row in rows]
    assert names[::2] == names[1::2] == LAYOUTS[1::2]
    assert [row["rematerializes"] for row in rows] == [False, True] * 2
    # Weights, and two numbers of Adam for each.
    state = [3 * WEIGHTS, 1.5 * WEIGHTS]
    for row, expected in zip(rows, [x for x in state for _ in range(2)], strict=True):
        outcome = row["outcome"]
        report = outcome["report"]
        assert outcome["fits"]
        assert not outcome["failure"]
        assert outcome["num_rows"] == 512
        assert expected < report["memory"]["arguments"] < expected + GIB / 8
        assert report["num_replicas"] == 2
        assert row["largest_batch"] >= 1024
    moved = [row["moved_bytes"] for row in rows[::2]]
    assert WEIGHTS / 2 <= moved[0] < 1.1 * WEIGHTS / 2
    assert moved[1] <= 1.1 * 3 * WEIGHTS / 2  # gathered at most twice, and scattered
    assert rows[1]["outcome"]["blocks"] == {"model": ["block", "block_1"]}
    assert plan["code"] == ["    strategy = dist.MirroredStrategy()"]
    assert "strategy = dist.MirroredStrategy()" in printed


def test_what_a_plan_cannot_change_is_said(plan_of):
    plan, printed = plan_of("--topology", "h100:8", *LAYOUTS, "steps.py", "watched")

    assert len(plan["rows"]) == 4
    for row in plan["rows"]:
        assert row["largest_batch"] is None
        assert bool(row["outcome"]["failure"]) == row["rematerializes"]
    assert "the batch of its loop" in printed
    assert "only layers of models in fit are rematerialized" in printed


def test_a_strategy_of_one_host_is_planned_for_all_hosts(plan_of):
    plan, _ = plan_of("--layout", "sharded in each host", "--topology", "h100:2x2", "own_parts.py")

    report = plan["rows"][0]["outcome"]["report"]
    weights, batch = 8 * 4 * 512 * 512, 64 * 4 * 512
    assert report["num_replicas"] == 4
    assert report["memory"]["arguments"] == weights / 2 + batch / 4
    argument = "experimental_shard_parameters='host'"
    assert plan["code"] == [f"    strategy = dist.MultiWorkerMirroredStrategy({argument})"]
