import warnings

import pytest

from distributary._threads import SHARE_VARIABLE
from distributary.devices import CpuThreads
from distributary.errors import DistributaryWarning


@pytest.mark.parametrize(
    ("num_cores", "num_devices", "before", "after"),
    [
        # Enough by themselves: nothing is set.
        (2, 1, {}, {}),
        (16, 8, {}, {}),
        # Two threads per device.
        (2, 8, {}, {"PJRT_NPROC": "16"}),
        (15, 8, {}, {"PJRT_NPROC": "16"}),
        # The user's own value is enough, be it more or less than the number of cores.
        (2, 2, {"PJRT_NPROC": "4"}, {"PJRT_NPROC": "4"}),
        (64, 2, {"PJRT_NPROC": "4"}, {"PJRT_NPROC": "4"}),
        (2, 2, {"NPROC": "4"}, {"NPROC": "4"}),
        # XLA reads PJRT_NPROC first and passes over what is no integer.
        (2, 2, {"PJRT_NPROC": "4", "NPROC": "1"}, {"PJRT_NPROC": "4", "NPROC": "1"}),
        (2, 2, {"PJRT_NPROC": "many", "NPROC": "4"}, {"PJRT_NPROC": "many", "NPROC": "4"}),
        (2, 2, {"PJRT_NPROC": ""}, {"PJRT_NPROC": "4"}),
    ],
)
def test_the_pool_has_two_threads_per_device(num_cores, num_devices, before, after):
    environ = dict(before)

    CpuThreads(environ, lambda: num_cores).enlarge(num_devices)

    assert environ == after


@pytest.mark.parametrize(
    ("num_cores", "before", "named", "size"),
    [
        (2, {"PJRT_NPROC": "3"}, "PJRT_NPROC=3", "8"),
        (64, {"PJRT_NPROC": "7"}, "PJRT_NPROC=7", "64"),
        (2, {"NPROC": "2"}, "NPROC=2", "8"),
        (2, {"PJRT_NPROC": "2", "NPROC": "99"}, "PJRT_NPROC=2", "8"),
        (8, {"PJRT_NPROC": "2", SHARE_VARIABLE: "1"}, "PJRT_NPROC=2", "8"),  # not a launcher's
    ],
)
def test_a_value_that_is_too_small_is_replaced_with_a_warning(num_cores, before, named, size):
    environ = dict(before)

    with pytest.warns(DistributaryWarning, match=f"^{named} .* 4 CPU devices.*PJRT_NPROC={size}"):
        CpuThreads(environ, lambda: num_cores).enlarge(4)

    assert environ == before | {"PJRT_NPROC": size}


@pytest.mark.parametrize("share", ["1", "3"])
def test_the_share_of_a_launcher_is_enlarged_without_a_warning(share):
    environ = {"PJRT_NPROC": share, SHARE_VARIABLE: share}
    threads = CpuThreads(environ, lambda: 64)

    with warnings.catch_warnings(action="error"):
        sizes = []
        for num_devices in (1, 2, 8, 1):
            threads.enlarge(num_devices)
            sizes.append(environ["PJRT_NPROC"])

    assert sizes == [share, "4", "16", share]


def test_a_later_number_of_devices_replaces_an_earlier_one():
    environ: dict[str, str] = {}
    threads = CpuThreads(environ, lambda: 2)

    sizes = []
    for num_devices in (8, 8, 4, 16, 1):
        threads.enlarge(num_devices)
        sizes.append(environ.get("PJRT_NPROC"))

    assert sizes == ["16", "16", "8", "32", None]
    environ["PJRT_NPROC"] = "12"  # by the user
    threads.enlarge(2)
    assert environ.pop("PJRT_NPROC") == "12"
    threads.enlarge(8)
    environ.clear()  # once JAX has started, the variable means nothing
    with warnings.catch_warnings(action="error"):
        threads.report(8, num_existing=8)


@pytest.mark.parametrize(
    ("num_cores", "environ", "num_devices", "num_existing"),
    [
        (2, {}, 1, 8),
        (2, {}, 4, 8),  # XLA has one thread for each of the eight
        (16, {}, 8, 8),
        (2, {"PJRT_NPROC": "16"}, 8, 8),
    ],
)
def test_a_pool_that_is_large_enough_is_not_reported(num_cores, environ, num_devices, num_existing):
    with warnings.catch_warnings(action="error"):
        CpuThreads(environ, lambda: num_cores).report(num_devices, num_existing=num_existing)
