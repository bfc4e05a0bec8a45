"""Steps compiled by the TPU and GPU compilers, compared with what is known about the models."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from distributary.engine import short_groups
from distributary.errors import InvalidValueError, MissingPackageError
from distributary.tools.compilation import collectives_of, parse_topology

_PROGRAMS = Path(__file__).parent / "programs"
# Memory of a chip, or of the core that is a device; the compilers keep some of it.
CHIP_GIB = {"v5e": 16, "v4": 16, "v6e": 32, "h100": 80}
MLP_BYTES = 4 * (784 * 256 + 256 + 256 * 10 + 10)


def test_a_keras_mlp_is_reduced_at_once_and_updated_in_place(compile_all):
    # Before it is trained, it is evaluated here, and compared with NumPy.
    evaluated = ["--topology", "v6e:2x4", "mlp.py", "evaluate"]
    topologies = ["v4:2x2x1", "h100:8", "2xv5e:2x4"]

    outcomes = compile_all(
        [evaluated, [*(word for name in topologies for word in ("--topology", name)), "mlp.py"]]
    )

    assert [o.exit_code for o in outcomes] == [0, 0], [o.stderr for o in outcomes]
    reports = [report for outcome in outcomes for report in outcome.reports]
    assert [report["topology"] for report in reports] == ["v6e:2x4", *topologies]
    scalars = 4 + 4 * 4 + 8  # iterations, two metrics, seed of the dropout
    state_bytes = 3 * MLP_BYTES + scalars
    # Large products over all replicas; the gradient of the images is not computed.
    flops = 2 * 160 * (2 * 784 * 256 + 3 * 256 * 10)
    for report in reports:
        chip = report["topology"].removeprefix("2x").partition(":")[0]
        num_devices = 16 if report["num_slices"] == 2 else 8
        assert report["num_replicas"] == report["num_devices_used"] == num_devices
        assert report["num_donated_arrays"] == report["num_state_arrays"]
        assert report["state_bytes"] == state_bytes
        memory = report["memory"]
        assert state_bytes <= memory["donated"] <= memory["outputs"] < memory["donated"] + 4096
        assert state_bytes < memory["arguments"] <= memory["total"] < 8 * memory["arguments"]
        assert 0.9 < memory["available"] / 2**30 / CHIP_GIB[chip] <= 1
        if chip == "h100":
            assert report["flops"] is None
        else:
            assert 1 <= report["flops"] * num_devices / flops < 1.6

    *of_one_slice, slices = reports
    for report in of_one_slice:
        assert report["num_hosts"] == report["num_slices"] == 1
        (all_reduce,) = report["collectives"]
        assert (all_reduce["kind"], all_reduce["num_calls"]) == ("all-reduce", 1)
        assert all_reduce["groups"] == [list(range(8))]
        # With the gradients go the loss and metrics.
        assert MLP_BYTES < all_reduce["num_bytes"] <= MLP_BYTES + 32
        assert report["all_reduced_bytes"] == all_reduce["num_bytes"]
        if report["topology"] == "h100:8":
            assert all_reduce["algorithm"] is None
        else:
            assert "Ring" in all_reduce["algorithm"]
            assert all_reduce["num_operands"] > 4  # two kernels, two biases

    # Gradients are summed within the slices, and an eighth of them on each device across these.
    assert (slices["num_hosts"], slices["num_slices"]) == (2, 2)
    reduced = {c["network"]: c["groups"] for c in slices["collectives"] if "reduce" in c["kind"]}
    assert reduced == {"slice": [list(range(8))], "slices": [[0, 1]]}
    assert 1 < slices["all_reduced_bytes"] / MLP_BYTES < 1.1
    # `run` sums all gradients at once, here and there. In `fit`, XLA keeps large ones apart,
    # divides these between the devices of a slice, and pads some.
    assert 1 <= slices["cross_slice_bytes"] / (MLP_BYTES / 8) < 1.16
    large = [c for c in slices["collectives"] if "reduce" in c["kind"] and c["num_bytes"] > 1024]
    for network, most in (("slice", 2), ("slices", 3)):
        assert 1 <= sum(c["network"] == network for c in large) <= most


PARTS_BYTES = 2 * (2 * 512 * 256 + 512 + 3 * (4 * 256 * 256 + 2 * 256 * 1024))  # in bfloat16


def test_weights_in_parts_are_gathered_twice_and_their_gradients_scattered(compile_all):
    programs = ("parts.py", "own_parts.py")  # `fit`, and a loop of one's own
    outcomes = compile_all([["--topology", "h100:8", program] for program in programs])
    report, of_loop = (outcome.reports[0] for outcome in outcomes)

    gathered = sum(c["num_bytes"] for c in report["collectives"] if c["kind"] == "all-gather")
    assert PARTS_BYTES < gathered <= 2.3 * PARTS_BYTES  # with activations
    # Neither all weights at once nor all gradients.
    sizes = [c["num_bytes"] for c in report["collectives"] if c["role"] != "activations"]
    assert max(sizes) < PARTS_BYTES / 2
    scattered = sum(c["num_bytes"] for c in report["collectives"] if c["kind"] == "reduce-scatter")
    assert 0.7 * PARTS_BYTES < scattered <= 1.05 * PARTS_BYTES  # with scales and biases
    # Weights in float32, and two numbers of Adam for each.
    assert report["state_bytes"] < 1.05 * 6 * PARTS_BYTES / 8
    assert report["num_donated_arrays"] == report["num_state_arrays"]

    each, count = 4 * 512 * 512, 8
    for kind, at_least in (("all-gather", 1.5), ("reduce-scatter", 1)):
        sizes = [c["num_bytes"] for c in of_loop["collectives"] if c["kind"] == kind]
        assert at_least * count * each <= sum(sizes) <= 2 * count * each
        assert max(sizes) < count * each / 2
    assert of_loop["state_bytes"] < 1.05 * count * each / 8


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_central_state_stays_in_host_memory_and_visits_its_device_in_parts(run_program, topology):
    replicas, update = map(json.loads, run_program("central.py", topology).splitlines())

    leaf = 4 * 8192 * 8192
    weights, state = 16 * leaf, 3 * 16 * leaf
    assert replicas["host_argument"] == replicas["host_output"] == 0
    assert weights < replicas["argument"] < weights + leaf
    assert 4 <= update["host_argument"] - state <= 512  # the number of the step
    assert update["host_argument"] == update["host_output"] == update["host_alias"]
    assert (update["argument"], update["output"] < 1024) == (weights, True)  # the gradients
    assert update["temp"] < 8 * leaf


ACCEPTED = [
    # What runs before the step has the values of eight replicas; the program checks them.
    ("watched", "v5e:2x4", "ran here\n"),
    ("two_reductions", "v5e:2x4", r"1 all-reduce of 1 array, 4 B, .*\n .* 1 all-reduce of 1 array"),
    ("one_device", "v5e:2x4", r"one_device, 1 replica on 1 of 8 devices\n .* none\n"),
    ("all_hosts", "v5e:4x4", r"all_hosts, 16 replicas\n  collectives +1 all-.* groups 0-15,"),
    # Within the slices, and an eighth of the sum on each device across these.
    (
        *("all_hosts", "2xv5e:2x4"),
        r" 1 all-reduce .* 16.0 KiB, groups 0-7, .*\n .* 1 all-reduce .* 2.0 KiB, groups 0-1 ac",
    ),
    ("loop", "h100:8", r"1 all-reduce of 1 array, 16.0 KiB, groups 0-7, 7 times in a loop\n"),
    (
        "loop",
        "v5e:2x4",
        r"[?] times in a loop.*\n  activations  none\n  all-reduced  at least 16.0 KiB",
    ),
    ("functional", "v5e:2x4", r"step +functional, 8 replicas\n"),
]
REFUSED = [
    ("memory", "v5e:2x4", r"memory does not fit into .* v5e:2x4.* available HBM \(15.75G\)"),
    ("memory", "h100:8", r"it needs \d{4}\.\d\d GiB per device, and a program can use 79.10 GiB"),
    ("unsupported", "v5e:2x4", "unsupported uses 'eig', which XLA does not have on a TPU"),
    ("loop", "v5e:4x4", r"4 of the 16 devices of v5e:4x4.* takes one host of 4"),
    ("no_step", "v5e:2x4", "without a training step.*ran no program under a strategy"),
    ("functional", "v5e:2x4", r"without a training step.*ran functional \(1 x\)"),
    ("a_cpu", "v5e:2x4", r"no device 'CPU:0': this process has TPU:0 to TPU:7\. .* for v5e:2x4"),
    ("another_kind", "v5e:2x4", r"no device 'GPU:0': .*for v5e:2x4: let the strategy find"),
    (
        "devices_of_jax",
        "h100:8",
        r"CpuDevice\(id=0\) is a device of this machine.* such as 'GPU:0'",
    ),
    ("central", "v5e:2x4", "reports steps that are one program, and these are two"),
    ("no_step", "v5e:3x3", "'v5e:3x3' does not exist, the compiler says: .*not divisible"),
]


# What XLA inserts into steps of `partitioned.py`, and the source line it is for. TPUs gather what
# GPUs exchange, so there only the lines are compared.
MOVING = {
    "normalized": ({"all-reduce"}, "(x - x.mean(0))"),
    "shuffled": ({"all-gather"}, '"shuffled":'),
    "all_shuffled": ({"all-reduce"}, "lambda w, b:"),
    "reversed": ({"collective-permute"}, '"reversed":'),
    "mixed": ({"all-gather", "all-to-all"}, '"mixed":'),
    "related": ({"all-gather", "reduce-scatter"}, '"related":'),
    "root": ({"all-reduce"}, '"root":'),
}
GRADIENT_BYTES = 3 * 64 * 64 * 4
# Bytes that start before the backward pass ends, of all sums of gradients.
SUMMED = {
    "dense": (0, GRADIENT_BYTES),
    "clipped": (0, GRADIENT_BYTES),
    "several_steps": (0, 4 * GRADIENT_BYTES),
    "sharded_state": (0, GRADIENT_BYTES),
    "sharded_weights": (0, GRADIENT_BYTES),
    "layers_in_a_loop": (5 * GRADIENT_BYTES // 3, 6 * GRADIENT_BYTES // 3),
    "large": (5 << 22, 12 << 22),
}
ON_TPUS = ["normalized", "reversed", "related", "dense", "several_steps", "layers_in_a_loop"]


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_collectives_that_move_activations_are_told_from_sums_of_gradients(run_program, topology):
    is_gpu = topology.startswith("h100")
    names = [*MOVING, *SUMMED] if is_gpu else ON_TPUS
    lines = run_program("partitioned.py", topology, *names).splitlines()
    source = (_PROGRAMS / "partitioned.py").read_text().splitlines()

    for name, found in map(json.loads, lines):
        activations = [c for c in found if c["role"] == "activations"]
        sums = [c for c in found if c["role"] == "sum"]
        if name in MOVING:
            kinds, text = MOVING[name]
            line = 1 + next(i for i, line in enumerate(source) if text in line)
            assert any(c["line"] == f"partitioned.py:{line}" for c in activations), name
            assert not is_gpu or {c["kind"] for c in activations} == kinds, name
        else:
            assert activations == [], name
            early, total = SUMMED[name]
            calls = {"several_steps": 4, "layers_in_a_loop": 6}.get(name, 1)
            assert sum(c["num_bytes"] for c in sums) * calls == total, name
            if is_gpu:  # TPUs combine all of them, and do not say how often a loop runs
                assert sum(c["num_bytes"] * c["num_early"] for c in sums) == early, name
    assert [name for name, _ in map(json.loads, lines)] == names


@pytest.mark.parametrize(
    ("order", "early"),
    [
        ("h g2 s2 g1 s1 d2 d1", [64]),
        ("h g2 g1 s2 s1 d2 d1", []),
        ("h g1 s1 d1 g2 s2 d2", [64]),
        # What is on the way from a gradient to its sum only moves it.
        ("h g2 g1 s1 t2 s2 d1 d2", []),
    ],
)
def test_a_sum_is_early_if_computations_for_other_sums_come_later(order, early):
    lines = {
        "h": "%h = f32[2,4] dot(%x, %w2)",
        "g1": "%g1 = f32[4,4] dot(%x, %h)",
        "g2": "%g2 = f32[4,4] dot(%h, %x)",
        "t2": "%t2 = f32[4,4] transpose(%g2)",
        "s1": "%s1 = f32[4,4] all-reduce-start(%g1), to_apply=%add",
        "s2": f"%s2 = f32[4,4] all-reduce-start(%{'t2' if 't2' in order else 'g2'})",
        "d1": "%d1 = f32[4,4] all-reduce-done(%s1)",
        "d2": "%d2 = f32[4,4] all-reduce-done(%s2)",
    }
    hlo = "\n  ".join(
        [
            "ENTRY %main (w1: f32[4,4], w2: f32[4,4], x: f32[2,4]) -> (f32[4,4], f32[4,4]) {",
            *(f"%{name} = f32[] parameter({i})" for i, name in enumerate(["w1", "w2", "x"])),
            *(lines[name] for name in order.split()),
            "%n1 = f32[4,4] subtract(%w1, %d1)",
            "%n2 = f32[4,4] subtract(%w2, %d2)",
            "ROOT %new = (f32[4,4], f32[4,4]) tuple(%n1, %n2)",
        ]
    )

    found = collectives_of(hlo, {2})

    assert [c.role for c in found] == ["sum", "sum"]
    assert [c.num_bytes for c in found for _ in range(c.num_early)] == early


def test_what_else_a_script_may_do(compile_all):
    def command(name, topology, *options):
        return ["--topology", topology, *options, "steps.py", name]

    named = [("--step", "functional") if name == "functional" else () for name, _, _ in ACCEPTED]
    accepted = [command(name, at, *n) for (name, at, _), n in zip(ACCEPTED, named, strict=True)]
    refused = [command(name, topology) for name, topology, _ in REFUSED]
    others = [
        command("no_step", "v5e:2x4", "--step", "mine"),
        ["--topology", "v5e:2x4", "absent.py"],
        ["--topology", "v5e:2x4", "-m", "steps", "one_device"],
    ]

    outcomes = compile_all([*accepted, *refused, *others])

    for outcome, (name, _, expected) in zip(outcomes, ACCEPTED, strict=False):
        assert outcome.exit_code == 0, outcome.stderr
        assert re.search(expected, outcome.stdout), (name, outcome.stdout)
        assert len(outcome.reports) == 1
    for outcome, (name, _, expected) in zip(outcomes[len(ACCEPTED) :], REFUSED, strict=False):
        assert (outcome.exit_code, outcome.reports) == (1, [])
        assert re.search(expected, outcome.stderr, re.DOTALL), (name, outcome.stderr)
    assert "steps.py never called a step 'mine'" in outcomes[-3].stderr
    assert "there is no file 'absent.py'" in outcomes[-2].stderr
    assert outcomes[-1].reports[0]["step"] == "one_device"


@pytest.mark.parametrize(
    "name", ["v5e", "v9:2x2", "v5e:2x4x4", "v4:2x2", "v5e:0x2", "0xv5e:2x2", "h100:2x2x2", "h100"]
)
def test_unknown_topologies_name_the_known_ones(name):
    with pytest.raises(InvalidValueError, match=f"--topology '{name}' is unknown. Known are TPUs"):
        parse_topology(name)


@pytest.mark.parametrize(
    ("topology", "module", "package"),
    [
        ("v5e:2x4", "libtpu", "jax[tpu]>="),
        ("h100:8", "jax_plugins.xla_cuda13", "jax-cuda13-plugin>="),
    ],
)
def test_a_missing_compiler_is_named_with_its_package(topology, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(MissingPackageError, match=re.escape(f"pip install '{package}")):
        parse_topology(topology)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("[2,4]<=[8]", np.arange(8).reshape(2, 4)),
        ("[4,2]<=[2,4]T(1,0)", np.arange(8).reshape(2, 4).T),
        ("mesh['a'=2,'b'=4] {'a'}", np.arange(8).reshape(2, 4).T),
        ("mesh['a'=2,'b'=2,'c'=2] {'b','c'}", np.arange(8).reshape(2, 4)),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh['a'=4], device_ids=(2,0,3,1) {'a'}", [[2, 0, 3, 1]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=1,'b'=2], device_ids=([1,2]) {'b','a'}", [[0, 1]]),
        ("mesh['a'=8] {'a':(1)2}", np.arange(8).reshape(2, 4).T),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_replica_groups_are_read_in_every_form(written, expected):
    hlo = f"ENTRY %main () -> f32[] {{\n  %a = f32[6]{{0}} all-reduce(%b), replica_groups={written}"

    (collective,) = collectives_of(hlo)

    np.testing.assert_array_equal(collective.groups, expected)
    assert collective.num_bytes == 24


def test_groups_are_shown_as_ranges():
    assert short_groups(((0, 1, 2, 4), (5, 6))) == "groups 0-2,4 | 5-6"
    assert short_groups(tuple((i, i + 5) for i in range(5))) == "5 groups of 2"
