"""Workers that end because another one was lost are not taken for the one that was."""

_ENDED_BECAUSE_OF_ANOTHER = """
print("distributary: worker 7 was lost", file=sys.stderr)
sys.exit(75)
"""


def test_the_worker_that_was_lost_is_named(launch):
    script = f"""
if name == "worker0":
    {_ENDED_BECAUSE_OF_ANOTHER.strip().replace(chr(10), "; ")}
if name == "worker1":
    sys.exit(3)
run_forever()
"""
    result = launch(script, num_workers=3)

    assert result.code == 3
    assert "[launcher] worker 1 ended with exit code 3" in result.stderr


def test_without_another_the_first_that_ended_tells_the_reason(launch):
    traceback = 'print("  File", end=" ", file=sys.stderr)'  # of another thread, under way
    script = f'if name == "worker1":\n    run_forever()\n{traceback}{_ENDED_BECAUSE_OF_ANOTHER}'

    result = launch(script)

    assert result.code == 75
    assert ": worker 7 was lost; ending all workers." in result.stderr
