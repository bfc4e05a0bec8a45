import logging
import os
import sys

import pytest

from distributary.cluster_resolver import SlurmClusterResolver
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError


@pytest.fixture
def step(set_environ):
    """Sets the variables of a job step: two nodes with two tasks each unless said otherwise."""

    def step(rank=0, nodes="t02n[13,41]", tasks="2(x2)", **more):
        set_environ(
            SLURM_PROCID=rank, SLURM_STEP_NODELIST=nodes, SLURM_STEP_TASKS_PER_NODE=tasks, **more
        )

    return step


def test_each_process_of_a_node_has_a_port(step):
    step(rank=3)

    resolver = SlurmClusterResolver()

    assert resolver.cluster_spec() == {
        "worker": ["t02n13:8888", "t02n13:8889", "t02n41:8888", "t02n41:8889"]
    }
    assert resolver.get_task_info() == ("worker", 3)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 3, "grpc")
    assert resolver.master() == "grpc://t02n41:8889"
    assert resolver.master("worker", 0, "http") == "http://t02n13:8888"
    assert resolver.num_accelerators() == {"GPU": 0}


def test_types_take_ranks_in_the_order_of_their_names(step):
    tasks = []
    for rank in range(4):
        step(rank=rank)
        resolver = SlurmClusterResolver(jobs={"worker": 2, "ps": 1, "chief": 1}, port_base=1000)
        tasks.append(resolver.get_task_info())

    assert tasks == [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
    assert resolver.cluster_spec() == {
        "chief": ["t02n13:1000"],
        "ps": ["t02n13:1001"],
        "worker": ["t02n41:1000", "t02n41:1001"],
    }


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("node7", ["node7"]),
        ("node[001-003,7],gpu-a", ["node001", "node002", "node003", "node7", "gpu-a"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[9-11]", ["n9", "n10", "n11"]),  # not sorted as texts
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1-2]-ib.cluster", ["n1-ib.cluster", "n2-ib.cluster"]),
    ],
)
def test_lists_of_nodes_are_expanded_in_their_order(step, nodes, expected):
    step(nodes=nodes, tasks=f"1(x{len(expected)})")

    spec = SlurmClusterResolver().cluster_spec()

    assert spec.job_tasks("worker") == [f"{host}:8888" for host in expected]


def test_slurm_must_number_the_processes_node_by_node(step):
    step(rank=1, SLURMD_NODENAME="t02n13", SLURM_LOCALID=1)
    assert SlurmClusterResolver().task_id == 1

    step(rank=1, SLURMD_NODENAME="t02n41", SLURM_LOCALID=0)

    with pytest.raises(ClusterError, match=r"^SLURMD_NODENAME is 't02n41', .* 't02n13'.*=block"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("nodes", "tasks_per_node", "expected"),
    [
        ("n[9-10]", 2, ["n9:1", "n9:2", "n10:1", "n10:2"]),
        (None, {"b": 1, "a": 2}, ["b:1", "a:1", "a:2"]),  # needs the rank only
    ],
)
def test_tasks_per_node_can_be_given(step, nodes, tasks_per_node, expected):
    step(nodes=nodes, tasks=None)

    resolver = SlurmClusterResolver(tasks_per_node=tasks_per_node, port_base=1)

    assert resolver.cluster_spec() == {"worker": expected}


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_a_missing_variable_is_named(step, set_environ, name):
    step()
    set_environ(**{name: None})

    # TensorFlow raises a RuntimeError.
    with pytest.raises(RuntimeError, match=f"^The environment variable {name} is not set.*srun"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLURM_PROCID", 4, r"^The environment variable SLURM_PROCID is '4', .*from 0 to 3"),
        ("SLURM_STEP_TASKS_PER_NODE", "4", r"is '4', .* each of the 2 nodes in .*'t02n\[13,41\]'"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x99999999999)", r"is '1\(x9.* each of the 2 nodes"),
        ("SLURM_STEP_NODELIST", "n[1-99999999999]", r"n\[1-9.*', .* more than 65536 nodes"),
        ("SLURM_STEP_NODELIST", "n[1-999]r[1-999]", r"n\[1-9.*', .* more than 65536 nodes"),
        ("SLURM_STEP_TASKS_PER_NODE", "", r"TASKS_PER_NODE is '', .*such as '4\(x2\),3'"),
        *[
            ("SLURM_STEP_NODELIST", nodes, rf"^SLURM_STEP_NODELIST is .*{part} is not a node.*'nod")
            for nodes, part in (("n[1-2", r"'n\[1-2'"), ("a,,b", "''"), ("n[1-2-3]", r"1-2-3\]'"))
        ],
    ],
)
def test_a_wrong_variable_is_refused(step, set_environ, name, value, message):
    step()
    set_environ(**{name: value})

    with pytest.raises((ClusterError, InvalidValueError), match=message):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"jobs": {"worker": 3}},
            ClusterError,
            "3 tasks, but the launcher has started 4 processes",
        ),
        ({"jobs": {"worker": 5, "ps": -1}}, InvalidValueError, r'jobs\["ps"\] is -1, .* >= 0'),
        ({"jobs": ["worker"]}, InvalidTypeError, r"jobs is \['worker'\], expected a dict"),
        ({"port_base": 0}, InvalidValueError, "port_base is 0, expected a number >= 1"),
        ({"tasks_per_node": "2"}, InvalidTypeError, r"tasks_per_node is '2'"),
        ({"gpus_per_node": -1}, InvalidValueError, "gpus_per_node is -1, expected a number >= 0"),
        ({"gpus_per_node": 3, "gpus_per_task": 2}, ClusterError, "need 4 GPUs, but the node has 3"),
        ({"gpus_per_node": 8}, ClusterError, r"need 8 GPUs, but .* has 3 \(5, 6, 7\)"),
    ],
)
def test_a_wrong_argument_is_refused(step, arguments, error, message):
    step(CUDA_VISIBLE_DEVICES="5,6,7")

    with pytest.raises(error, match=f"^SlurmClusterResolver: .*{message}"):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(
    ("visible", "arguments", "num_gpus", "shown"),
    [
        # The third process is the first of its node, the fourth the second.
        (None, {"gpus_per_node": 4}, 2, "2,3"),
        (None, {"gpus_per_node": 0}, 0, ""),
        ("4,5,6,7", {}, 2, "6,7"),
        ("GPU-a, GPU-b", {}, 1, "GPU-b"),
        # Nothing to set: no GPUs, too few of them, or Slurm has bound them already.
        (None, {}, 0, None),
        (None, {"gpus_per_node": 1}, 0, None),
        ("-1", {}, 0, "-1"),
        ("0,1", {"SLURM_GPUS_PER_TASK": 2}, 2, "0,1"),
        ("2,3", {"SLURM_GPUS_ON_NODE": 4}, 2, "2,3"),
        # Switched off.
        (None, {"gpus_per_node": 4, "auto_set_gpu": False}, 2, None),
    ],
)
def test_a_process_is_shown_its_own_gpus(step, caplog, visible, arguments, num_gpus, shown):
    variables = {name: value for name, value in arguments.items() if name.startswith("SLURM")}
    step(rank=3, CUDA_VISIBLE_DEVICES=visible, **variables)
    caplog.set_level(logging.INFO)

    resolver = SlurmClusterResolver(**{k: v for k, v in arguments.items() if k not in variables})

    assert resolver.num_accelerators() == {"GPU": num_gpus}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible  # not before cluster_spec()

    for _ in range(2):
        resolver.cluster_spec()

        assert os.environ.get("CUDA_VISIBLE_DEVICES") == shown
    assert [record.message for record in caplog.records] == (
        [f"SlurmClusterResolver(auto_set_gpu=True) sets CUDA_VISIBLE_DEVICES to {shown!r}"]
        if shown != visible
        else []
    )


def _install_nvidia_smi(folder, set_environ, lines, exit_code=0):
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable} -S\nimport sys\nassert sys.argv[1:] == ['--list-gpus']\n"
        f"print({lines!r})\nsys.exit({exit_code})\n"
    )
    program.chmod(0o755)
    set_environ(PATH=folder)


def test_without_variables_nvidia_smi_counts_the_gpus_or_its_failure_is_reported(
    step, tmp_path, set_environ
):
    step()
    _install_nvidia_smi(tmp_path, set_environ, "GPU 0: A (UUID: x)\nGPU 1: A (UUID: y)\n")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 1}

    _install_nvidia_smi(tmp_path, set_environ, "Driver not loaded", exit_code=9)

    with pytest.raises(ClusterError, match=r"^nvidia-smi cannot.*exit status 9.*set CUDA_VISIBLE"):
        SlurmClusterResolver()
    assert SlurmClusterResolver(gpus_per_node=0).num_accelerators() == {"GPU": 0}
