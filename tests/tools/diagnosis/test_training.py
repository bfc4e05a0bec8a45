"""The short training and the all-reduce of the doctor find replicas that compute wrongly."""

import re

import jax
import pytest

import distributary as dist
from distributary.tools.diagnosis import _examination
from distributary.tools.diagnosis._examination import all_reduce, training


class _Wrong(dist.CrossDeviceOps):
    """Sums in which every replica counts with a weight."""

    def __init__(self, weights):
        self._weights = jax.numpy.asarray(weights)

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        weight = self._weights[jax.lax.axis_index("replica")]
        return jax.tree.map(
            lambda x: jax.lax.psum((x * weight).astype(x.dtype), "replica"),
            per_replica_value.payload,
        )


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1.0, 1.0], None),
        ([1.0, 0.9], r"its weights differ from those of one device by \d\.\de-0\d"),
        ([0.0, 0.0], "the network does not learn"),
        ([1.0, float("nan")], "the network does not learn"),
    ],
)
def test_wrong_sums_are_found(weights, problem):
    strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=_Wrong(weights))

    check = training(strategy)

    if problem is None:
        assert (check.status, check.fix) == ("ok", None)
    else:
        assert check.status == "problem"
        assert re.search(problem, check.detail), check.detail
        assert "one device at a time" in check.fix


def test_replicas_that_differ_are_found(monkeypatch):
    """As after a bit of one device's memory has changed."""
    strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"])
    created, changed = [], []
    run = strategy.run

    def creates(value):
        created.append(dist.Variable(value))
        return created[-1]

    def runs(*args, **kwargs):
        result = run(*args, **kwargs)
        if not changed:
            kernel = created[0]
            changed.append(kernel)
            first, second = (shard.data for shard in kernel._value.addressable_shards)
            copies = [first, second.at[0, 0].add(1e-6)]
            kernel._value = jax.make_array_from_single_device_arrays(
                kernel.shape, kernel._value.sharding, copies
            )
        return result

    monkeypatch.setattr(_examination, "Variable", creates)
    monkeypatch.setattr(strategy, "run", runs)

    check = training(strategy)

    assert check.status == "problem"
    assert check.detail.endswith("the replicas have different weights")
    assert check.numbers["difference_to_one_device"] < 1e-3


def test_a_wrong_sum_is_a_problem(monkeypatch):
    mesh = dist.MirroredStrategy(["CPU:0", "CPU:1"]).extended.mesh
    assert all_reduce(mesh, None).status in ("ok", "warning")
    real = jax.lax.psum

    without_one = lambda row, axis: real(row * (jax.lax.axis_index(axis) != 1), axis)
    monkeypatch.setattr(_examination.jax.lax, "psum", without_one)

    check = all_reduce(mesh, None)

    assert check.status == "problem"
    assert check.detail == "the sum of 4 B over 2 replicas is wrong"
    assert "NCCL" in check.fix
