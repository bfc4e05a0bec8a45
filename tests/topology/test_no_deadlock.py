import os
import pathlib

import pytest

_PROGRAM = pathlib.Path(__file__).with_name("no_deadlock_program.py")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the cores cannot be limited")
@pytest.mark.parametrize(
    ("mode", "expected"), [("pool", ["learned"]), ("window", ["1 DistributaryWarning", "learned"])]
)
def test_many_steps_in_a_row_do_not_wait_for_each_other(run_file, mode, expected):
    assert run_file(str(_PROGRAM), mode).splitlines() == expected
