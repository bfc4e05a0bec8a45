import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from distributary.devices import REPLICA_AXIS, host_groups, make_mesh, replica_devices
from distributary.errors import DeviceError

_DEVICE = jax.local_devices(backend="cpu")[1]


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_replicas_are_on_the_devices_of_a_sequence_in_its_order(make):
    cpu = jax.local_devices(backend="cpu")

    assert replica_devices(make([cpu[2], cpu[0]])) == (cpu[2], cpu[0])
    assert replica_devices(make(["CPU:2", "/cpu:0"])) == (cpu[2], cpu[0])
    assert replica_devices(["CPU:2", cpu[1]]) == (cpu[2], cpu[1])
    assert replica_devices(None) == tuple(jax.local_devices())
    mesh = make_mesh((cpu[2], cpu[0]))
    assert mesh.axis_names == (REPLICA_AXIS,) == ("replica",)
    assert tuple(mesh.devices) == (cpu[2], cpu[0])


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "devices is an empty list.*pass None"),
        (_DEVICE, re.escape(f"pass [{_DEVICE!r}]")),
        ("CPU:0", re.escape("devices is 'CPU:0', expected a list") + ".*" + r"\['CPU:0'\]"),
        (4, re.escape("devices is 4 (int), expected a list") + ".*'GPU:0', 'GPU:1'"),
        ([0, 1], "0 is an int, expected a device string"),
        (["CPU:0", "garbage"], "'garbage' is not a device"),
        (["CPU:0", "/job:worker/task:1/cpu:0"], "'/job:worker/task:1/cpu:0' names a device of an"),
        (["CPU:0", "CPU:1", "/cpu:0"], "Replicas 0 and 2 are both on CPU:0: 'CPU:0' and '/cpu:0'"),
        (["CPU:0", "GPU:0"], "'GPU:0' is a GPU and 'CPU:0' is a CPU: .* of one kind"),
        (["CPU:0", "CPU:8", "CPU:9"], r"no device 'CPU:8'.*set_logical_cpu_devices\(10\)"),
    ],
)
def test_a_list_that_names_no_distinct_devices_of_one_kind_is_refused(devices, message):
    with pytest.raises(DeviceError, match=message):
        replica_devices(devices)


@pytest.mark.parametrize(
    ("platform", "processes", "slices", "expected"),
    [
        ("cpu", [0, 0, 1, 1], None, ((0, 1), (2, 3))),
        ("cpu", [0, 1, 0, 1], None, ((0, 2), (1, 3))),
        ("cpu", [0, 0, 0, 0], None, ()),
        ("cpu", [0, 1, 2, 3], None, ()),
        ("cpu", [0, 0, 0, 1], None, ()),
        ("gpu", [0, 0, 1, 1], [0, 0, 0, 0], ((0, 1), (2, 3))),
        ("tpu", [0, 0, 1, 1], [0, 0, 0, 0], ()),
        ("tpu", [0, 1, 2, 3], [0, 0, 1, 1], ((0, 1), (2, 3))),
        ("tpu", [0, 0, 1, 1], [0, 1, 2, 3], ()),
    ],
)
def test_groups_are_slices_else_hosts_of_several_devices(platform, processes, slices, expected):
    devices = [SimpleNamespace(process_index=process, platform=platform) for process in processes]
    for device, number in zip(devices, slices or (), strict=False):
        device.slice_index = number

    assert host_groups(devices) == expected
