import re

import jax
import pytest

from distributary.devices import canonical_name, local_devices_of, resolve_device, short_name
from distributary.errors import DeviceError


@pytest.mark.parametrize(
    ("text", "kind", "index"),
    [
        ("/gpu:0", "GPU", 0),
        ("/device:CPU:1", "CPU", 1),
        ("/DEVICE:gpu:12", "GPU", 12),
        ("TPU:0", "TPU", 0),
        ("/cpu", "CPU", 0),
        ("/job:localhost/replica:0/task:0/device:GPU:3", "GPU", 3),
        ("/Job:LocalHost/Task:0/gpu:2", "GPU", 2),
        ("/task:0/cpu:1", "CPU", 1),
    ],
)
def test_strings_of_tensorflow_users_are_understood(text, kind, index):
    assert short_name(text) == f"{kind}:{index}"
    assert canonical_name(text) == f"/job:localhost/replica:0/task:0/device:{kind}:{index}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "CPU0", "CPU:", "CPU:-1", "CPU:*", " CPU:0", "CPU:0\n", "CPU:٣", "CPU:0,CPU:1"),
        *("cuda:0", "/job:localhost/replica:0/task:0", "/job:/device:CPU:0", "//CPU:0"),
    ],
)
def test_a_string_that_is_no_device_is_refused(text):
    with pytest.raises(DeviceError, match=f"^{re.escape(repr(text))} is not a device.*'GPU:0'"):
        canonical_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "/job:worker/device:GPU:0",
        "/job:localhost/replica:0/task:1/gpu:0",
        "/replica:1/GPU:0",
    ],
)
def test_a_device_of_another_process_is_refused(text):
    with pytest.raises(DeviceError, match=f"{text}' names a device of another .*'GPU:0'.*Worker"):
        canonical_name(text)


def test_devices_are_named_by_their_position():
    devices = jax.local_devices(backend="cpu")

    assert canonical_name(devices[3]) == "/job:localhost/replica:0/task:0/device:CPU:3"
    assert short_name(devices[3]) == "CPU:3"

    assert resolve_device("/device:cpu:5") is devices[5]
    assert resolve_device(devices[2]) is devices[2]
    assert local_devices_of("CPU") == tuple(devices)


def test_an_index_beyond_the_devices_is_refused_with_the_call_that_makes_it():
    with pytest.raises(
        DeviceError,
        match=r"no device 'CPU:11': this process has CPU:0 to CPU:7\."
        r" .*set_logical_cpu_devices\(12\) at the top of the program",
    ):
        resolve_device("CPU:11")


@pytest.mark.skipif(jax.config.jax_platforms != "cpu", reason="the machine may have the device")
@pytest.mark.parametrize("text", ["GPU:7", "TPU:0"])
def test_a_kind_that_the_machine_lacks_is_refused_with_what_exists(text):
    kind = text[:3]
    with pytest.raises(
        DeviceError,
        match=f"no device '{text}': this process has CPU:0 to CPU:7. JAX has started no {kind}",
    ):
        resolve_device(text)
