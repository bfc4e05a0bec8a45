"""Where TPU cores lie, and which of them make up replicas."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from distributary.errors import DeviceError, InvalidTypeError, InvalidValueError
from distributary.tpu.experimental import DeviceAssignment, DeviceOrderMode, Topology


def _grid(*shape, num_tasks=1):
    """A topology whose devices fill the grid in the order of the coordinates."""
    places = np.array(list(itertools.product(*map(range, shape))))
    return Topology(mesh_shape=shape, device_coordinates=places.reshape(num_tasks, -1, 4))


def test_a_topology_knows_its_devices():
    places = [[[0, 0, 0, 0], [1, 0, 0, 0]], [[0, 1, 0, 0], [1, 1, 0, 0]]]

    topology = Topology(mesh_shape=[2, 3, 1, 1], device_coordinates=places)

    for same in (topology, Topology(topology.serialized())):
        np.testing.assert_array_equal(same.mesh_shape, [2, 3, 1, 1])
        np.testing.assert_array_equal(same.device_coordinates, places)
        np.testing.assert_array_equal(same.missing_devices, [[0, 2, 0, 0], [1, 2, 0, 0]])
        assert (same.mesh_rank, same.num_tasks, same.num_tpus_per_task) == (4, 2, 2)
        assert same.task_ordinal_at_coordinates([0, 1, 0, 0]) == 1
        assert same.tpu_device_ordinal_at_coordinates(np.array([1, 1, 0, 0])) == 1
        assert same.tpu_device_name_at_coordinates([1, 0, 0, 0]) == "/task:0/device:TPU:1"
        name = same.cpu_device_name_at_coordinates([1, 1, 0, 0], job="worker")
        assert name == "/job:worker/task:1/device:CPU:0"
        with pytest.raises(InvalidValueError, match=r"no device at the coordinates \[0, 2, 0, 0\]"):
            same.task_ordinal_at_coordinates([0, 2, 0, 0])


@pytest.mark.parametrize(
    ("mesh_shape", "coordinates", "match"),
    [
        ([2, 1, 1], [[[0, 0, 0]]], r"mesh_shape is \[2, 1, 1\], expected 4 positive"),
        (None, [[[0, 0, 0, 0]]], "mesh_shape is None"),
        ([1.5, 1, 1, 1], [[[0, 0, 0, 0]]], "expected integers"),
        ([2, 1, 1, 1], [[0, 0, 0, 0]], r"shape \[1, 4\], expected \[task, device, 4\]"),
        ([2, 1, 1, 1], [[[2, 0, 0, 0]]], r"task 0 has the coordinates \[2, 0, 0, 0\], outside"),
        ([2, 1, 1, 1], [[[1, 0, 0, 0]] * 2], "which another one has"),
    ],
)
def test_what_is_no_topology_is_refused(mesh_shape, coordinates, match):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=match):
        Topology(mesh_shape=mesh_shape, device_coordinates=coordinates)
    with pytest.raises(ValueError, match=r"serialized is b'\\x08\\x02', expected what"):
        Topology(b"\x08\x02")


def test_devices_that_have_no_place_of_their_own_fill_the_grid():
    devices = jax.devices()

    line = Topology.of_devices(devices)
    box = Topology.of_devices(devices, mesh_shape=[2, 2, 1, 2])

    assert line.mesh_shape.tolist() == [8, 1, 1, 1]
    assert box.jax_device([1, 0, 0, 1]) is devices[5]
    with pytest.raises(InvalidValueError, match=r"\[3, 1, 1, 1\], which has 3 places for 8"):
        Topology.of_devices(devices, mesh_shape=[3, 1, 1, 1])
    with pytest.raises(DeviceError, match="at least one"):
        Topology.of_devices([])


class _Tpu:
    """What a device of a TPU says about its place."""

    def __init__(self, process_index, coords, core_on_chip=0, slice_index=0):
        self.process_index, self.slice_index = process_index, slice_index
        self.coords, self.core_on_chip = coords, core_on_chip


def test_slices_lie_behind_each_other():
    devices = [_Tpu(s, [x, 4, 0], 0, s) for s in range(2) for x in range(2)]

    topology = Topology.of_devices(devices)

    assert topology.mesh_shape.tolist() == [2, 1, 2, 1]
    assert topology.jax_device([1, 0, 1, 0]) is devices[3]
    with pytest.raises(DeviceError, match=r"have \[1, 2\] devices, expected as many"):
        Topology.of_devices(devices[:3])


# The order of tf.tpu.experimental.DeviceAssignment.build.
@pytest.mark.parametrize(
    ("grid", "arguments", "expected"),
    [
        # Both cores of a chip before the next chip, and x before y.
        ((2, 2, 1, 2), {"num_replicas": 4}, [["0000"], ["0001"], ["1000"], ["1001"]]),
        # All of a grid: replicas along a ring.
        ((2, 2, 1, 1), {"num_replicas": 4}, [["0000"], ["1000"], ["1100"], ["0100"]]),
        (
            (2, 2, 1, 1),
            {"num_replicas": 4, "device_order_mode": DeviceOrderMode.MESH},
            [["0000"], ["1000"], ["0100"], ["1100"]],
        ),
        # The chips of a replica along a ring.
        (
            (2, 2, 1, 2),
            {"computation_shape": [2, 2, 1, 2]},
            [["0000", "0001", "1000", "1001", "1100", "1101", "0100", "0101"]],
        ),
        (
            (4, 1, 1, 1),
            {
                "computation_shape": [2, 1, 1, 1],
                "computation_stride": [2, 1, 1, 1],
                "num_replicas": 2,
            },
            [["0000", "2000"], ["1000", "3000"]],
        ),
    ],
)
def test_replicas_are_placed_as_in_tensorflow(grid, arguments, expected):
    for topology in (_grid(*grid), _grid(*grid).serialized()):
        assignment = DeviceAssignment.build(topology, **arguments)

        found = [["".join(map(str, at)) for at in c] for c in assignment.core_assignment.tolist()]
        assert found == expected


def test_an_assignment_names_the_devices_of_a_replica():
    topology = _grid(2, 2, 1, 2, num_tasks=2)  # the tasks have x = 0 and x = 1

    assignment = DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=4)

    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (4, 2)
    # Along the ring come (0, 0), (1, 0), (1, 1), (0, 1), and replicas count host by host.
    assert [assignment.coordinates(r, 1)[:2] for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert assignment.lookup_replicas(1, 0) == [2, 3]
    assert assignment.tpu_ordinal(3, 1) == 3
    assert assignment.tpu_device(3, 1, job="worker") == "/job:worker/task:1/device:TPU:3"
    assert assignment.host_device(1) == "/task:0/device:CPU:0"
    with pytest.raises(InvalidValueError, match="replica is 4, expected 0 to 3"):
        assignment.coordinates(4, 0)
    with pytest.raises(InvalidValueError, match="logical core 2 on task 1"):
        assignment.lookup_replicas(1, 2)


def test_where_devices_are_missing_replicas_take_those_that_are_there():
    places = [[[x, y, 0, 0] for x, y in ((0, 0), (1, 0), (2, 1))]]
    topology = Topology(mesh_shape=[3, 2, 1, 1], device_coordinates=places)

    assignment = DeviceAssignment.build(topology, num_replicas=3)

    np.testing.assert_array_equal(assignment.core_assignment[:, 0], places[0])
    with pytest.raises(InvalidValueError, match="only 3 of shape"):
        DeviceAssignment.build(topology, num_replicas=4)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_replicas": 9}, r"num_replicas is 9, but only 8 of shape \[1, 1, 1, 1\]"),
        ({"num_replicas": 0}, "num_replicas is 0, expected a number >= 1"),
        ({"num_replicas": 1.0}, "num_replicas is 1.0, expected an int"),
        (
            {"computation_shape": [4, 1, 1, 1]},
            r"takes \[4, 1, 1, 1\], .* has the size \[2, 2, 1, 2\]",
        ),
        ({"computation_shape": [1, 1, 1]}, r"computation_shape is \[1, 1, 1\], expected 4"),
        ({"computation_stride": [0, 1, 1, 1]}, "computation_stride is .*, expected 4"),
        ({"device_order_mode": DeviceOrderMode.RING}, "RING, which needs replicas that fill"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(arguments, match):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=match):
        DeviceAssignment.build(_grid(2, 2, 1, 2), **arguments)


@pytest.mark.parametrize(
    ("assignment", "match"),
    [
        ([[0, 0, 0, 0]], r"shape \[1, 4\], expected \[replica, core, 4\]"),
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], "used by replica 0 and by replica 1"),
        ([[[5, 0, 0, 0]]], "no device at the coordinates"),
    ],
)
def test_what_is_no_assignment_is_refused(assignment, match):
    with pytest.raises(ValueError, match=match):
        DeviceAssignment(_grid(2, 2, 1, 2), assignment)
    with pytest.raises(ValueError, match="expected a Topology"):
        DeviceAssignment("v5e:2x2", assignment)


@st.composite
def _requests(draw):
    grid = [draw(st.integers(1, 4)) for _ in range(3)] + [draw(st.integers(1, 2))]
    shape = [draw(st.integers(1, size)) for size in grid]
    stride = [draw(st.integers(1, size // block)) for size, block in zip(grid, shape, strict=True)]
    room = math.prod(g // (b * s) * s for g, b, s in zip(grid, shape, stride, strict=True))
    return grid, shape, stride, draw(st.integers(1, room))


@given(_requests())
def test_replicas_are_blocks_that_do_not_overlap(request):
    grid, shape, stride, num_replicas = request

    assignment = DeviceAssignment.build(_grid(*grid), shape, stride, num_replicas)

    places = assignment.core_assignment
    assert places.shape == (num_replicas, math.prod(shape), 4)
    assert len({tuple(at) for at in places.reshape(-1, 4).tolist()}) == places[..., 0].size
    for cores in places:
        block = sorted(map(tuple, (cores - cores.min(axis=0)).tolist()))
        steps = [range(0, size * step, step) for size, step in zip(shape, stride, strict=True)]
        assert block == list(itertools.product(*steps))


@pytest.mark.parametrize("grid", [(4, 4, 1, 1), (4, 2, 2, 2), (1, 4, 2, 1), (6, 1, 2, 1)])
def test_a_ring_goes_from_neighbour_to_neighbour(grid):
    ring = DeviceAssignment.build(
        _grid(*grid), computation_shape=grid, device_order_mode=DeviceOrderMode.RING
    )

    chips = ring.core_assignment[0, :: grid[-1], :3]
    assert len({tuple(chip) for chip in chips.tolist()}) == math.prod(grid[:3])
    steps = np.abs(chips - np.roll(chips, 1, axis=0)).sum(axis=1)
    np.testing.assert_array_equal(steps, 1)
