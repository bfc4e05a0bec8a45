import pytest

from distributary.cluster_resolver import OpenMPIClusterResolver
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError


@pytest.fixture
def start(set_environ):
    """Sets what `mpirun` of Open MPI sets."""

    def start(rank=0, size=4, local_rank=0, local_size=2, **more):
        set_environ(
            OMPI_COMM_WORLD_RANK=rank,
            OMPI_COMM_WORLD_SIZE=size,
            OMPI_COMM_WORLD_LOCAL_RANK=local_rank,
            OMPI_COMM_WORLD_LOCAL_SIZE=local_size,
            **more,
        )

    return start


_FOUR = {"worker": ["a:8888", "a:8889", "b:8888", "b:8889"]}


@pytest.mark.parametrize(
    "hosts",
    [["a", "b"], ("a", "b"), {"a": 2, "b": 9}, {"a": 2, "b": 2}, ["a", "a", "b", "b"]],
)
def test_ranks_fill_one_host_after_the_other(start, hosts):
    start(rank=3, local_rank=1)

    resolver = OpenMPIClusterResolver(hosts)

    assert resolver.cluster_spec() == _FOUR
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 3, "grpc")
    assert resolver.master() == "grpc://b:8889"
    assert resolver.master("worker", 0, "http") == "http://a:8888"


def test_ranks_can_be_spread_over_the_hosts(start):
    start(rank=1, local_rank=0, local_size=2)

    resolver = OpenMPIClusterResolver(["a", "b"], map_by="node", port_base=1)

    assert resolver.cluster_spec() == {"worker": ["a:1", "b:1", "a:2", "b:2"]}


def test_on_one_host_no_names_are_needed(start):
    start(rank=1, size=2, local_rank=1, local_size=2)

    resolver = OpenMPIClusterResolver()

    assert resolver.cluster_spec() == {"worker": ["localhost:8888", "localhost:8889"]}
    assert resolver.task_id == 1


def test_hydra_sets_other_variables(set_environ):
    set_environ(PMI_RANK=1, PMI_SIZE=2, MPI_LOCALRANKID=0, MPI_LOCALNRANKS=1)

    resolver = OpenMPIClusterResolver(["a", "[fd00::2]"])

    assert resolver.cluster_spec() == {"worker": ["a:8888", "[fd00::2]:8888"]}
    assert resolver.task_id == 1


def test_hosts_can_have_different_numbers_of_slots(start):
    start(rank=3, local_rank=0, local_size=1)

    resolver = OpenMPIClusterResolver({"a": 3, "fd00::2": 1}, jobs={"worker": 3, "chief": 1})

    assert resolver.cluster_spec() == {
        "chief": ["a:8888"],
        "worker": ["a:8889", "a:8890", "[fd00::2]:8888"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)


def test_a_host_that_receives_no_process_is_left_out(start):
    start(rank=0, size=2, local_rank=0, local_size=2)

    spec = OpenMPIClusterResolver({"a": 2, "b": 2}).cluster_spec()

    assert spec == {"worker": ["a:8888", "a:8889"]}


def test_outside_of_mpirun_the_variables_are_named():
    with pytest.raises(ClusterError, match=r"OMPI_COMM_WORLD_RANK .*PMI_RANK .*mpirun has not st"):
        OpenMPIClusterResolver()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": None}, "^The environment variable OMPI_COMM_WORLD_SIZE is not set.*mpirun"),
        ({"size": "four"}, "OMPI_COMM_WORLD_SIZE is 'four'"),
        ({"rank": 4}, "OMPI_COMM_WORLD_RANK is '4', expected a number from 0 to 3"),
        ({"local_size": None}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
        ({"local_size": 5}, "OMPI_COMM_WORLD_LOCAL_SIZE is '5', expected a number from 0 to 4"),
        ({"local_rank": None}, "OMPI_COMM_WORLD_LOCAL_RANK is not set"),
        (
            {"local_rank": 1},
            (
                r"OMPI_COMM_WORLD_LOCAL_RANK is 1 and OMPI_COMM_WORLD_LOCAL_SIZE is 2, but with"
                r" these hosts and numbers of processes, process 0 would be number 0 of 2 on host 0"
                r" \(a\),.*map_by as in mpirun --map-by"
            ),
        ),
        (
            {"local_size": 3},
            r"LOCAL_SIZE is 3, but .* process 0 would be number 0 of 2 on host 0",
        ),
    ],
)
def test_wrong_variables_are_refused(start, settings, message):
    start(**settings)

    with pytest.raises(ClusterError, match=message):
        OpenMPIClusterResolver({"a": 2, "b": 2})


def test_several_hosts_must_be_named(start):
    start()

    with pytest.raises(
        ClusterError, match=r"OMPI_COMM_WORLD_SIZE is 4 and .*_LOCAL_SIZE is 2,.*PBS_NODEFILE"
    ):
        OpenMPIClusterResolver()


def test_hosts_must_have_enough_slots(start):
    start()

    with pytest.raises(ClusterError, match=r"SIZE is 4, but the hosts have 3 slots: \{'a': 2, 'b"):
        OpenMPIClusterResolver({"a": 2, "b": 1})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hosts": []}, InvalidTypeError, "hosts .*not empty"),
        ({"hosts": {}}, InvalidTypeError, "hosts .*not empty"),
        ({"hosts": "a,b"}, InvalidTypeError, r"hosts is 'a,b' \(str\), expected a list"),
        ({"hosts": ["a", 1]}, InvalidTypeError, r"hosts\[1\] is 1 \(int\)"),
        ({"hosts": ["a", "b:2"]}, InvalidValueError, r"hosts\[1\] is 'b:2'.*\{\"node1\": 4"),
        ({"hosts": [":2"]}, InvalidValueError, r"hosts\[0\] is ':2'"),
        ({"hosts": {"a": 0}}, InvalidValueError, r'hosts\["a"\] is 0, expected a number >= 1'),
        ({"map_by": "core"}, InvalidValueError, r"map_by is 'core', expected \"slot\" or \"node\""),
        ({"hosts": ["a", "b"], "port_base": -1}, InvalidValueError, "port_base is -1"),
        ({"hosts": ["a", "b"], "jobs": {"worker": 1}}, ClusterError, "which is 1 tasks"),
    ],
)
def test_a_wrong_argument_is_refused(start, arguments, error, message):
    start()

    with pytest.raises(error, match=f"^OpenMPIClusterResolver: .*{message}"):
        OpenMPIClusterResolver(**arguments)


def test_a_host_that_is_none_is_refused_by_the_cluster_spec(start):
    start()

    with pytest.raises(InvalidValueError, match=r'cluster\["worker"\]\[0\] is \'a b:8888\''):
        OpenMPIClusterResolver(["a b", "c"]).cluster_spec()
