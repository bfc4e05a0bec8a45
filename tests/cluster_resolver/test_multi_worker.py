import pytest

from distributary.cluster_resolver import ClusterSpec, Peer, multi_worker
from distributary.errors import InvalidTypeError, InvalidValueError

_FULL = {"evaluator": ["e:1"], "ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1"], "chief": ["c:1"]}
_WORKERS_ONLY = {"worker": ["w0:1", "w1:1", "w2:1"]}


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "number", "is_chief"),
    [
        (_FULL, "chief", 0, 0, True),
        (_FULL, "worker", 1, 2, False),
        (_FULL, "ps", 1, None, False),
        (_FULL, "evaluator", 0, None, True),
        (_WORKERS_ONLY, "worker", 0, 0, True),  # coordinates without a chief
        (_WORKERS_ONLY, "worker", 2, 2, False),
        (_WORKERS_ONLY, "evaluator", 0, None, True),
    ],
)
def test_the_chief_comes_first_and_workers_follow(cluster, task_type, task_id, number, is_chief):
    place = multi_worker(cluster, task_type, task_id)

    assert place.worker_number == number
    assert place.in_collective_group == (number is not None)
    assert place.is_chief == is_chief
    assert place.num_workers == 3
    assert place.coordinator == place.workers[0]


def test_a_task_knows_itself_and_the_others():
    place = multi_worker(ClusterSpec(_FULL), "worker", 1)

    assert [str(peer) for peer in place.peers] == [
        "chief at c:1",
        "worker 0 at w0:1",
        "worker 1 at w1:1",
        "ps 0 at p0:1",
        "ps 1 at p1:1",
        "evaluator at e:1",
    ]
    assert place.workers == place.peers[:3]
    assert (place.task_type, place.task_id, place.name) == ("worker", 1, "worker 1")
    assert place.address == "w1:1"
    assert place.cluster_spec == _FULL
    assert place.other_workers == (Peer("chief", 0, "c:1"), Peer("worker", 0, "w0:1"))
    peer = Peer("worker", 1, "[fd00::1]:2222")
    assert (peer.host, peer.port) == ("fd00::1", 2222)  # as sockets take them


def test_tasks_that_are_missing_are_none():
    place = multi_worker(_WORKERS_ONLY, "evaluator", 0)

    assert (place.address, place.name) == (None, "evaluator")
    assert place.other_workers == place.workers
    alone = multi_worker({"evaluator": ["e:1"]}, "evaluator", 0)
    assert (alone.coordinator, alone.num_workers) == (None, 0)
    # Parameter servers may have gaps.
    assert multi_worker({"worker": ["w:1"], "ps": {1: "p1:1"}}, "ps", 1).address == "p1:1"


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        (_FULL, 7, 0, r"^task_type is 7"),
        (_FULL, "worker", "zero", r"^task_id is 'zero'"),
        ({}, "worker", 0, r"^The cluster is empty.*MirroredStrategy.*TF_CONFIG unset"),
        (_FULL, None, None, r"^task_type is None.*ps 0, 1; worker 0, 1; chief 0.*TF_CONFIG"),
        (_FULL, "worker", None, r'^task_id is None.*"index": 0'),
        (_FULL, "wrker", 0, r'^task_type is "wrker", but .*worker 0, 1; chief 0. Choose one'),
        (_FULL, "worker", 2, r'^task_type is "worker" and task_id is 2, .*worker 0, 1;'),
        (_WORKERS_ONLY, "evaluator", 1, r'^task_type is "evaluator" and task_id is 1, but'),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, r'^cluster_spec\["chief"\] has 2 tasks.*one chief'),
        ({"tpu_worker": ["a:1"]}, "worker", 0, r'has the key "tpu_worker".*not a task type'),
        ({"worker": {0: "a:1", 2: "b:1"}}, "worker", 0, r"\[0, 2\], but worker 1 is missing"),
    ],
)
def test_a_wrong_cluster_or_task_is_refused(cluster, task_type, task_id, message):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        multi_worker(cluster, task_type, task_id)
