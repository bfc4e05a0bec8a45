"""Programs travel, and only harmless ones that have arrived whole are run."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distributary.errors import InvalidValueError
from tests.servers.wire import ProgramCache, export_divided, export_per_device


def _sort():
    closed = jax.make_jaxpr(lambda x: [jnp.sort(x)])(np.zeros(4, np.float32))
    return export_per_device(closed, [("data", 0)], num_devices=1)


def test_a_program_runs_on_the_first_cpu_whatever_the_default_device_is():
    program, cache = _sort(), ProgramCache()
    first, *_, last = jax.devices("cpu")

    with jax.default_device(last):
        assert cache.add(program.content) == program.name
        (result,) = cache.run(program.name, [np.array([3, 1, 2, 0], np.float32)])

    np.testing.assert_array_equal(result, [0, 1, 2, 3])
    assert result.devices() == {first}


def test_a_damaged_program_is_refused():
    damaged = bytearray(_sort().content)
    damaged[40] ^= 1

    with pytest.raises(InvalidValueError, match=r"A program of \d+ bytes has been damaged"):
        ProgramCache().add(bytes(damaged))


def test_a_program_that_calls_unknown_code_is_refused():
    def call(x):
        return jax.ffi.ffi_call("cpu_reads_files", jax.ShapeDtypeStruct((4,), np.float32))(x)

    exported = jax.export.export(
        jax.jit(call),
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("cpu_reads_files")],
    )(np.zeros(4, np.float32))
    serialized = bytes(exported.serialize())

    with pytest.raises(InvalidValueError, match="calls 'cpu_reads_files', which is not among"):
        ProgramCache().add(hashlib.sha256(serialized).digest() + serialized)


@pytest.mark.parametrize("num_rows", [8, 7])
def test_devices_share_the_rows_of_a_divided_program(num_rows):
    def step(x, w):
        hidden = jnp.tanh(x @ w)
        return [hidden.sum(0), x.T @ hidden]

    x = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    w = np.eye(3, 5, dtype=np.float32)
    devices = jax.devices("cpu")[:2]

    program = export_divided(jax.make_jaxpr(step)(x, w), [True, False], 2)

    cache = ProgramCache(devices)
    results = cache.run(cache.add(program.content), [x, w])
    for got, expected in zip(results, step(x, w), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    exported = jax.export.deserialize(bytearray(program.content[32:]))
    mesh = jax.sharding.Mesh(devices, ("replica",))
    call = jax.jit(exported.call, in_shardings=exported.in_shardings_jax(mesh))
    text = call.lower(*exported.in_avals).compile().as_text()
    assert "f32[4,5]" in text  # of each device
    assert f"f32[{num_rows},5]" not in text
