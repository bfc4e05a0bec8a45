"""A job in which nothing moves ends and says where everybody is; slow workers are waited for.

All kinds of hangs are tried by tests/nightly/hangs.py; tests/job has them within one process.
"""

import pytest

from distributary.errors import WorkerLostError

_HANGS = ("hang_queue_get", "hang_endless_loop", "hang_polls_for_a_file")


@pytest.mark.parametrize("name", _HANGS)
def test_a_worker_that_hangs_is_named_with_the_place(name, job):
    workers = job(2)
    for worker in range(2):
        workers.start("hangs", worker, name)

    all_ended = workers.wait()

    assert [ended.code for ended in all_ended] == [WorkerLostError.exit_code] * 2, all_ended
    for ended in all_ended:
        said = [line for line in ended.output.splitlines() if line.startswith("distributary: ")]
        assert len(said) == 1, ended.output
        address = workers.addresses[1]
        assert f"worker 1 at {address} did not get anywhere for 3 s" in said[0]
        assert f"in {name}" in said[0]  # the stack
        assert "worker 0 at " in said[0]
        assert "has begun the program of train_step (hangs.py:" in said[0]


def test_a_worker_that_is_slow_is_waited_for(job):
    workers = job(2)
    for worker in range(2):
        workers.start("hangs", worker, "slow")

    for ended in workers.wait():
        assert ended.code == 0, ended.output
        assert ended.result == {"trained": True}
