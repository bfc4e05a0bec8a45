import pytest

from distributary.cluster_resolver import OpenMPIClusterResolver
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError


@pytest.fixture
def start(set_environ):
    """Sets what `mpirun` of Open MPI sets."""

    def start(rank=0, size=4, local_rank=0, local_size=2):
        set_environ(
            OMPI_COMM_WORLD_RANK=rank,
            OMPI_COMM_WORLD_SIZE=size,
            OMPI_COMM_WORLD_LOCAL_RANK=local_rank,
            OMPI_COMM_WORLD_LOCAL_SIZE=local_size,
        )

    return start


def test_ranks_fill_one_host_after_the_other(start):
    start(rank=3, local_rank=1)

    resolver = OpenMPIClusterResolver(["a", "b"])

    assert resolver.cluster_spec() == {"worker": ["a:8888", "a:8889", "b:8888", "b:8889"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 3, "grpc")
    assert resolver.master() == "grpc://b:8889"


def test_on_one_host_no_names_are_needed(start):
    start(rank=1, size=2, local_rank=1, local_size=2)

    resolver = OpenMPIClusterResolver(port_base=1, jobs={"worker": 1, "chief": 1})

    assert resolver.cluster_spec() == {"chief": ["localhost:1"], "worker": ["localhost:2"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


def test_hydra_sets_other_variables(set_environ):
    set_environ(PMI_RANK=1, PMI_SIZE=2, MPI_LOCALRANKID=0, MPI_LOCALNRANKS=1)

    resolver = OpenMPIClusterResolver(["a", "[fd00::2]"])

    assert resolver.cluster_spec() == {"worker": ["a:8888", "[fd00::2]:8888"]}
    assert resolver.task_id == 1


def test_outside_of_mpirun_the_variables_are_named():
    with pytest.raises(ClusterError, match=r"OMPI_COMM_WORLD_RANK .*PMI_RANK .*mpirun has not st"):
        OpenMPIClusterResolver()


_AB = ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "hosts", "error", "message"),
    [
        (
            {"size": None},
            _AB,
            ClusterError,
            "^The environment variable OMPI_COMM_WORLD_SIZE is not",
        ),
        ({"rank": 4}, _AB, ClusterError, "WORLD_RANK is '4', expected a number from 0 to 3"),
        ({"local_size": 5}, _AB, ClusterError, "_SIZE is '5', expected a number from 0 to 4"),
        ({"local_rank": 1}, _AB, ClusterError, "RANK is 0, .*_RANK is 1 .* with consecutive ranks"),
        ({}, None, ClusterError, r"SIZE is 4, .*_SIZE is 2, .* 1: \['localhost'\]. Pass the nam"),
        ({}, [*_AB, "c"], ClusterError, r"SIZE is 4, .*_SIZE is 2, .* has 3: \['a', 'b', 'c'\]"),
        ({}, "a,b", InvalidTypeError, r"^OpenMPIClusterResolver: hosts is 'a,b', expected a li"),
        ({}, ["a", 1], InvalidTypeError, r"^OpenMPIClusterResolver: hosts is \['a', 1\]"),
        ({}, ["a b", "c"], InvalidValueError, r'^cluster\["worker"\]\[0\] is \'a b:8888\''),
        ({}, ["b:2", "c"], InvalidValueError, r'^cluster\["worker"\]\[0\] is \'\[b:2\]:8888\''),
    ],
)
def test_variables_and_hosts_that_are_wrong_or_do_not_fit_are_refused(
    start, settings, hosts, error, message
):
    start(**settings)

    with pytest.raises(error, match=message):
        OpenMPIClusterResolver(hosts).cluster_spec()
