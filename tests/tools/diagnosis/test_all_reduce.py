"""The all-reduce of the doctor looks at the sums."""

import jax
import pytest

import distributary as dist
from distributary.tools.diagnosis import _all_reduce
from distributary.tools.diagnosis._all_reduce import all_reduce


@pytest.mark.parametrize("lost", [0, 1])
def test_a_wrong_sum_is_a_problem(monkeypatch, lost):
    mesh = dist.MirroredStrategy(["CPU:0", "CPU:1"]).extended.mesh
    assert all_reduce(mesh, None).status in ("ok", "warning")
    real = jax.lax.psum

    def without_one(row, axis):
        return real(row * (jax.lax.axis_index(axis) != lost), axis)

    monkeypatch.setattr(_all_reduce.jax.lax, "psum", without_one)

    check = all_reduce(mesh, None)

    assert check.status == "problem"
    assert check.detail == "the sum of 4 B over 2 replicas is wrong"
    assert "NCCL" in check.fix
