"""Workers that wait for another one say where it is; `timeout_seconds` ends the job."""

from distributary.errors import WorkerLostError


def _messages_of_ended(workers):
    """Waits until a job has been ended, and returns the one message of each worker."""
    all_ended = workers.wait()
    assert [ended.code for ended in all_ended] == [WorkerLostError.exit_code] * 2, all_ended
    messages = []
    for ended in all_ended:
        said = [text for text in ended.output.splitlines() if text.startswith("distributary: ")]
        assert len(said) == 1, ended.output
        messages += said
    return messages


def test_a_job_ends_after_its_timeout_and_says_where_all_workers_are(job):
    workers = job(2).start_all("hangs", "loop")

    first, second = workers.addresses
    for said in _messages_of_ended(workers):
        assert f"have waited for worker 1 at {second} for 6 s, the timeout_seconds" in said
        assert "in interrupt: " in said  # the stack
        assert f"worker 0 at {first} last began the program of train_step (hangs.py:" in said


def test_a_worker_that_is_slow_is_waited_for_and_reported(job):
    workers = job(2).start_all("hangs", "slow")

    all_ended = workers.wait()

    for ended in all_ended:
        assert ended.code == 0, ended.output
        assert ended.result == {"trained": True}
    said = [text for text in all_ended[0].output.splitlines() if "have waited for" in text]
    assert len(said) == 1, all_ended[0].output
    assert f"worker 1 at {workers.addresses[1]} for 3 s" in said[0]
    assert "in interrupt: time.sleep(5.0)" in said[0]


def test_a_job_whose_workers_all_wait_ends_after_its_timeout(job):
    workers = job(2).start_all("hangs", "save")

    first, second = workers.addresses
    for said in _messages_of_ended(workers):
        assert "the workers have waited for 6 s, the timeout_seconds" in said
        assert f"worker 0 at {first} last began the program of train_step" in said
        assert f"worker 1 at {second} waits for all before file 0 saved" in said


def test_a_worker_that_takes_an_answer_late_is_waited_for(job):
    for ended in job(2).start_all("hangs", "late").wait():
        assert ended.code == 0, ended.output
        assert ended.result == {"trained": True}
