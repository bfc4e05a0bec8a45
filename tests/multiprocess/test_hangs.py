"""Workers that wait for another one say where it is; `timeout_seconds` ends the job."""

from distributary.errors import WorkerLostError


def test_a_job_ends_after_its_timeout_and_says_where_all_workers_are(job):
    workers = job(2).start_all("hangs", "loop")

    all_ended = workers.wait()

    assert [ended.code for ended in all_ended] == [WorkerLostError.exit_code] * 2, all_ended
    first, second = workers.addresses
    for ended in all_ended:
        said = [text for text in ended.output.splitlines() if text.startswith("distributary: ")]
        assert len(said) == 1, ended.output
        assert f"have waited for worker 1 at {second} for 6 s, the timeout_seconds" in said[0]
        assert "in interrupt: " in said[0]  # the stack
        assert f"worker 0 at {first} last began the program of train_step (hangs.py:" in said[0]


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

    all_ended = workers.wait()

    assert [ended.code for ended in all_ended] == [WorkerLostError.exit_code] * 2, all_ended
    first, second = workers.addresses
    for ended in all_ended:
        said = [text for text in ended.output.splitlines() if text.startswith("distributary: ")]
        assert len(said) == 1, ended.output
        assert "the workers have waited for 6 s, the timeout_seconds" in said[0]
        assert f"worker 0 at {first} last began the program of train_step" in said[0]
        assert f"worker 1 at {second} waits for all before file 0 saved" in said[0]


def test_a_worker_that_takes_an_answer_late_is_waited_for(job):
    for ended in job(2).start_all("hangs", "late").wait():
        assert ended.code == 0, ended.output
        assert ended.result == {"trained": True}
