"""What happens before and after JAX starts: most tests are processes of their own."""

import os
import re
from pathlib import Path

import jax
import pytest

from distributary.config import set_logical_cpu_devices
from distributary.errors import BackendStartedError, InvalidValueError

_PRINT_DEVICES = """
print(len(jax.local_devices()), os.environ.get("PJRT_NPROC"))
"""


_FLAG = "--xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("program", "environ", "expected"),
    [
        # Logical devices are made as the list asks.
        ("devices.replica_devices(['/cpu:3', '/cpu:1'])", {}, "4 8"),
        ("devices.replica_devices(None)", {}, "1 None"),
        # A later call replaces an earlier one; a list never takes devices away.
        ("config.set_logical_cpu_devices(8); config.set_logical_cpu_devices(2)", {}, "2 4"),
        ("config.set_logical_cpu_devices(4); devices.replica_devices(['CPU:0'])", {}, "4 8"),
        ("config.set_logical_cpu_devices(2); devices.replica_devices(['CPU:4'])", {}, "5 10"),
        # Those that the environment asks for are kept.
        ("devices.replica_devices(['CPU:0', 'CPU:1'])", {"XLA_FLAGS": f"{_FLAG}=4"}, "4 8"),
        ("devices.replica_devices(['CPU:0', 'CPU:2'])", {"XLA_FLAGS": f"{_FLAG}=2"}, "3 6"),
        (
            "devices.replica_devices(None)",
            {"JAX_NUM_CPU_DEVICES": "3", "PJRT_NPROC": "20"},
            "3 20",
        ),
    ],
)
def test_devices_are_made_before_jax_starts(run_python, program, environ, expected):
    assert run_python(program + _PRINT_DEVICES, environ) == expected


def test_a_small_pool_in_the_environment_is_replaced_with_a_warning(run_python):
    program = """
import warnings

with warnings.catch_warnings(record=True, action="always") as caught:
    config.set_logical_cpu_devices(4)
print(caught[0].category.__name__, caught[0].filename, os.environ["PJRT_NPROC"])
"""
    assert run_python(program, {"PJRT_NPROC": "2"}) == "DistributaryWarning <string> 8"


# Fails when XLA no longer takes the size of its pool from the variable.
def test_xla_makes_a_pool_of_the_size_that_was_set(run_python):
    program = """
import pathlib

devices.replica_devices(["CPU:0", "CPU:1", "CPU:2"])
jax.numpy.ones(3).block_until_ready()
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen"))
"""
    assert run_python(program) == "6"


def test_a_small_pool_after_the_start_is_reported_once(run_python):
    program = """
import warnings

jax.config.update("jax_num_cpu_devices", 4)
jax.devices()
with warnings.catch_warnings(record=True, action="always") as caught:
    config.set_logical_cpu_devices(4)
    devices.replica_devices(None)
print(len(caught), caught[0].category.__name__, caught[0].message, os.environ.get("PJRT_NPROC"))
"""
    printed = run_python(program)

    assert re.match("1 DistributaryWarning JAX was started before distributary", printed)
    assert re.search(r"4 CPU devices share a pool of 4 .*set_logical_cpu_devices\(4\)", printed)
    assert printed.endswith("None")


def test_no_other_number_of_devices_than_jax_has_is_accepted():
    jax.devices()
    set_logical_cpu_devices(8)

    message = r"devices\(4\): JAX has already .*\(8\) cannot.*NUM_CPU_DEVICES=4"
    with pytest.raises(BackendStartedError, match=message):
        set_logical_cpu_devices(4)


@pytest.mark.parametrize("value", [0, 1025, True, 2.0, None])
def test_a_number_of_devices_that_is_no_positive_int_is_refused(value):
    with pytest.raises(InvalidValueError, match=f"num_devices is {value!r}, expected an int from"):
        set_logical_cpu_devices(value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the cores cannot be limited")
@pytest.mark.parametrize(
    ("mode", "expected"), [("pool", ["learned"]), ("window", ["1 DistributaryWarning", "learned"])]
)
def test_many_steps_in_a_row_do_not_wait_for_each_other(run_file, mode, expected):
    program = Path(__file__).with_name("no_deadlock_program.py")

    assert run_file(str(program), mode).splitlines() == expected
